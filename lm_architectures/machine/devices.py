"""This process: its device, dtypes, threads and place among processes; terminal and signals."""
import atexit
import ctypes
import math
import os
import platform
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from lm_architectures.files import UserError, first_line

Device = Literal['auto', 'cuda', 'cpu', 'mps']  # types of the scripts' settings
DType = Literal['auto', 'bfloat16', 'float32']

QUOTA = Path('/sys/fs/cgroup/cpu.max')  # where Linux shows a container's CPU quota


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
        self.compiles = self.device.type == 'cuda' if on is None else on
        if self.device.type != 'cuda' and not on:
            return model
        from lm_architectures.machine import compiling
        compiling.set_compiler_options()  # FlexAttention is compiled even if the model is not
        return compiling.compile_model(model) if self.compiles else model

    def eager(self) -> AbstractContextManager:
        """Return a context in which compiled models run eagerly, for inputs of changing shapes."""
        return torch.compiler.set_stance('force_eager') if self.compiles else nullcontext()

    def peak_flops(self) -> float | None:
        """Return the GPU's peak FLOP/s, or None if unknown."""
        if self.device.type != 'cuda':
            return None
        from lm_architectures.machine.compiling import peak_flops
        return peak_flops(self.device, self.dtype)

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


def pick_dtype(name: DType, device: str, big_enough: bool = True) -> torch.dtype:
    """Return the dtype of matrix products. auto: bf16 on CUDA and on CPUs with bf16 instructions.

    big_enough: False for models so small that bf16 does not pay off on a CPU.
    """
    if name != 'auto':
        return getattr(torch, name)
    tests = ('_is_amx_tile_supported', '_is_avx512_bf16_supported')  # private functions, may be missing
    on_cpu = device == 'cpu' and big_enough and any(getattr(torch.cpu, test, bool)() for test in tests)
    return torch.bfloat16 if device == 'cuda' or on_cpu else torch.float32


def decoding_dtype(name: DType, device: str) -> torch.dtype:
    """Return the dtype of weights and cache for decoding. auto: bf16 on CUDA, else fp32."""
    return pick_dtype(name, device, big_enough=False)


# ---- processes and threads ----

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


def ranks() -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size) as set by torchrun or SLURM.

    (0, 1, 0, 1) for a single process, even if it inherited RANK from another program.
    """
    needed = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR'}
    is_worker = 'TORCHELASTIC_RUN_ID' in os.environ or needed <= os.environ.keys()
    defaults = {'RANK': 0, 'WORLD_SIZE': 1, 'LOCAL_RANK': 0, 'LOCAL_WORLD_SIZE': 1}
    return tuple(int(os.environ.get(name, default)) if is_worker else default for name, default in defaults.items())


def init_distributed(backend: str) -> None:
    """Initialize torch.distributed if there are several processes. Prints a hint after 10 s."""
    rank, world, *_ = ranks()
    if world == 1 or dist.is_initialized():
        return
    os.environ.setdefault('MASTER_PORT', '29500')
    line = (f'process {rank} is waiting for all {world} processes at {os.environ["MASTER_ADDR"]}: start the others, or '
            'unset RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR to run one process')
    timer = threading.Timer(10, print, [line], {'file': sys.stderr, 'flush': True})
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(backend)
    except (dist.DistNetworkError, ValueError) as error:
        raise UserError(f'process {rank} cannot connect at {os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]} '
                        f'({first_line(error)}): if another job uses the port, set MASTER_PORT to a free one')
    finally:
        timer.cancel()
    if backend == 'gloo':  # with NCCL, this would wait for the others after an error of one process
        atexit.register(dist.destroy_process_group)


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
        for parameter, value in ((-3, 2 ** 31 - 1), (-1, 2 ** 31 - 1), (-2, 2 ** 28)):  # mmap, trim thresholds, top pad
            libc.mallopt(parameter, value)


# ---- terminal and signals ----

def make_progress() -> Callable[[str], None]:
    """Return a function that prints progress: on a terminal, one updating line; else every 10 s."""
    shown = 0.0

    def progress(line):
        nonlocal shown
        if sys.stdout.isatty():
            say(line[:shutil.get_terminal_size().columns - 1], end='')
        elif time.time() - shown > 10:
            shown = time.time()
            say(line)
    return progress


def say(line: str, end: str = '\n') -> None:
    """Print a permanent line, above the updating one."""
    with suppress(OSError):  # the terminal is closed: SIGHUP will stop the run
        print(('\r\x1b[K' if sys.stdout.isatty() else '') + line, end=end, flush=True)


@contextmanager
def catch_signals() -> Iterator[list]:
    """Yield a list that becomes non-empty at the first SIGINT, SIGTERM or SIGHUP.

    A second SIGINT or SIGTERM ends the program as usual; a second SIGHUP, which shells may send, is
    ignored. Signals that were ignored before (under nohup) stay ignored.
    """
    stop = []
    if threading.current_thread() is not threading.main_thread():  # Python allows it only there
        yield stop
        return

    def on_signal(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
