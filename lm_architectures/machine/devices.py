"""The device of this process, the dtype of its matrix products, its CPU threads and memory."""
import ctypes
import math
import os
import platform
import re
import resource
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lm_architectures.files import UserError
from lm_architectures.machine.parallel import init_distributed, ranks

Device = Literal['auto', 'cuda', 'cpu', 'mps']  # types of the scripts' settings
DType = Literal['auto', 'bfloat16', 'float32']

QUOTA = Path('/sys/fs/cgroup/cpu.max')  # where Linux shows a container's CPU quota
PEAK_FLOPS = {  # dense bf16, from the vendors' data sheets; a MIG slice or a laptop's GPU has a longer name
    'H100 80GB HBM3': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200': 989e12, 'H200 NVL': 835e12,
    'H800': 989e12, 'A100-SXM4-40GB': 312e12, 'A100-SXM4-80GB': 312e12, 'A100-PCIE-40GB': 312e12,
    'A100 80GB PCIe': 312e12, 'A800-SXM4-80GB': 312e12, 'A800 80GB PCIe': 312e12, 'B200': 2250e12, 'L40S': 362e12,
    'L4': 121e12, 'GeForce RTX 4090': 165e12, 'GeForce RTX 3090': 71e12}


@dataclass
class Machine:
    """This process: rank, number of processes, device and dtype of matrix products."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    launcher: int | None = None  # process id of torchrun; None: started without it
    compiles: bool = False  # set by `compiled`

    def is_orphan(self) -> bool:
        """Return True if the torchrun that started this process has died."""
        return self.launcher is not None and os.getppid() != self.launcher

    def compiled(self, model: torch.nn.Module, on: bool | None):
        """Return the model for training, compiled if `on`; None: on GPUs only.

        Compiles a model with `blocks` in place. Call it before DDP and FSDP wrap the model.
        """
        is_gpu = self.device.type == 'cuda'
        self.compiles = is_gpu if on is None else on
        if is_gpu or self.compiles:  # on GPUs, FlexAttention is compiled even if the model is not
            from lm_architectures.machine import compiling
            compiling.set_compiler_options()
        return compiling.compile_model(model) if self.compiles else model

    def eager(self) -> AbstractContextManager:
        """Return a context in which compiled models run eagerly, for inputs of changing shapes."""
        return torch.compiler.set_stance('force_eager') if self.compiles else nullcontext()

    def peak_flops(self) -> float | None:
        """Return the GPU's peak FLOP/s, for MFU in the log, or None if it is not in the list."""
        if self.device.type != 'cuda' or self.dtype != torch.bfloat16:
            return None
        return PEAK_FLOPS.get(torch.cuda.get_device_name(self.device).removeprefix('NVIDIA '))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def peak_bytes(self) -> int:
        """Return the peak memory of this process in bytes, on the GPU or else on the host."""
        if self.device.type == 'cuda':
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


# ---- devices and dtypes ----

def pick_device(name: Device) -> str:
    """Return 'cuda', 'cpu' or 'mps'. auto: cuda if available, else cpu."""
    available = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    if name == 'auto':
        return 'cuda' if available['cuda'] else 'cpu'
    if not available.get(name):
        raise UserError(f'device is {name!r}, but PyTorch finds no such device: use --device=cpu, or install a PyTorch '
                        'build for it')
    return name


def local_device(name: Device) -> torch.device:
    """Return the device of this process. Selects the GPU of its local rank."""
    device, local = torch.device(pick_device(name)), ranks()[2]
    if device.type != 'cuda':
        return device
    if local >= torch.cuda.device_count():
        raise UserError(f'process {local} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()} here. '
                        'Start fewer processes, or use --device=cpu')
    torch.cuda.set_device(local)
    return torch.device('cuda', local)


def pick_dtype(name: DType, device: str, bf16_on_cpu: bool = False) -> torch.dtype:
    """Return the dtype of matrix products, or of weights and cache. auto: bf16 on CUDA, else fp32.

    bf16_on_cpu: also bf16 on CPUs with bf16 instructions.
    """
    if name != 'auto':
        return getattr(torch, name)
    tests = '_is_amx_tile_supported', '_is_avx512_bf16_supported'  # private functions of PyTorch, may be missing
    has_bf16 = any(getattr(torch.cpu, test)() for test in tests if hasattr(torch.cpu, test))
    is_fast = device == 'cuda' or device == 'cpu' and bf16_on_cpu and has_bf16
    return torch.bfloat16 if is_fast else torch.float32


# ---- start, threads, memory ----

def start_processes(s) -> Machine:
    """Join the other processes and set up device, threads, allocator. s has `device`, `threads`."""
    rank, world, _, local_world = ranks()
    device = local_device(s.device)
    if device.type != 'cuda':
        set_threads(s.threads, local_world)
        torch.set_flush_denormal(True)  # arithmetic on denormals is far slower
        keep_freed_pages()
    init_distributed('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo')
    return Machine(rank, world, device, launcher=os.getppid() if 'TORCHELASTIC_RUN_ID' in os.environ else None)


def usable_cores() -> int:
    """Return the number of CPU cores of this process, by its affinity and container quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    with suppress(OSError, ValueError):  # no such file; 'max': no quota
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def omp_threads() -> int | None:
    """Return the first number in OMP_NUM_THREADS, which may be a list (4,2); None if unset."""
    found = re.match('[1-9][0-9]{0,3}', os.environ.get('OMP_NUM_THREADS', '').strip())
    return int(found[0]) if found else None


def set_threads(n_threads: int | None, local_world: int) -> None:
    """Set the number of CPU threads. None: PyTorch's default, or cores / local processes.

    OMP_NUM_THREADS replaces the default, except for the value 1 that torchrun sets.
    """
    omp = omp_threads()
    if n_threads is None and (omp is None or local_world > 1 and omp == 1):
        share = max(1, usable_cores() // local_world)
        n_threads = share if local_world > 1 else min(share, torch.get_num_threads())
    if n_threads is not None:
        torch.set_num_threads(n_threads)


def keep_freed_pages() -> None:
    """Make glibc reuse freed memory instead of returning it to the kernel: fewer page faults."""
    if sys.platform == 'linux' and platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL('libc.so.6')
        if not libc.mallopt(-3, 2 ** 31 - 1):  # threshold of mmap
            libc.mallopt(-3, 2 ** 25)  # the largest of an older glibc
        libc.mallopt(-1, 2 ** 31 - 1)  # threshold of trimming
        libc.mallopt(-2, 2 ** 28)  # top pad
