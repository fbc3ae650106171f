"""Where a script runs: devices, processes, the allocator, the FLOP/s of a device, its terminal and its signals."""
import ctypes
import functools
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.files import UserError

PEAK_FLOPS = {  # dense bf16 (V100: fp16), vendors' data sheets
    'H100 PCIe': 756e12, 'H100': 989e12, 'H200': 989e12, 'H800': 989e12, 'A100': 312e12, 'A800': 312e12,
    'B200': 2250e12, 'L40S': 362e12, 'L4': 121e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12}
HANG_UP = getattr(signal, 'SIGHUP', signal.SIGTERM)  # Windows has no SIGHUP


@dataclass
class Machine:
    """Where this process runs: its rank among `world` processes, its device, and the dtype of its products."""

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    launcher: int | None = None  # process id of the torchrun that started this process, if one did

    def is_orphan(self) -> bool:
        """Whether the torchrun that started this process is gone."""
        return self.launcher is not None and os.getppid() != self.launcher

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def pick_device(name: str) -> str:
    """'cuda', 'cpu' or 'mps' for a device setting of auto, cuda, cpu or mps; UserError if it is not to be had."""
    if name not in ('auto', 'cuda', 'cpu', 'mps'):
        raise UserError(f"device is {name!r}: expected 'auto', 'cuda', 'cpu' or 'mps'")
    if name == 'mps' and not torch.backends.mps.is_available():
        raise UserError('device is mps, but PyTorch sees no Apple GPU here: use --device=cpu')
    has_gpu = torch.cuda.is_available()
    if name == 'cuda' and not has_gpu:
        raise UserError('device is cuda, but PyTorch sees no GPU here: use --device=cpu, or install a CUDA build of '
                        'PyTorch')
    if name == 'auto':
        return 'cuda' if has_gpu else 'cpu'
    return name


def memory_bytes() -> float:
    """Memory of this machine; inf where the system does not say, as Windows."""
    if not hasattr(os, 'sysconf'):
        return math.inf
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def pick_dtype(name: str, device: str, big_enough: bool = True) -> torch.dtype:
    """The dtype of products for a setting of auto, bfloat16 or float32.

    auto is bf16 on GPUs, and on CPUs with bf16 units if the model is big enough to gain.
    """
    if name not in ('auto', 'bfloat16', 'float32'):
        raise UserError(f"dtype is {name!r}: expected 'auto', 'bfloat16' or 'float32'")
    if name != 'auto':
        return getattr(torch, name)
    if device != 'cpu':
        return torch.bfloat16 if device == 'cuda' else torch.float32
    tests = ('_is_amx_tile_supported', '_is_avx512_bf16_supported')  # private, so they may be missing
    has_units = any(getattr(torch.cpu, test, bool)() for test in tests)
    return torch.bfloat16 if big_enough and has_units else torch.float32


def start_processes(s) -> Machine:
    """Joins torchrun's processes, if any, and picks this one's device. s: settings with `device` and `threads`.

    Sets what holds for the whole process: its GPU, or its threads (None: its share of the cores) and allocator.
    """
    rank, world, local, local_world = torchrun_ranks()
    launcher = os.getppid() if 'RANK' in os.environ else None
    kind = pick_device(s.device)
    if kind == 'cuda':
        take_gpu(local)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
        torch.set_num_threads(s.threads or max(1, cores // local_world))
        torch.set_flush_denormal(True)  # arithmetic on denormal numbers is far slower
        keep_freed_memory()
    if world > 1 and not dist.is_initialized():
        join_processes('cpu:gloo,cuda:nccl' if kind == 'cuda' else 'gloo')
    device = torch.device(kind, local) if kind == 'cuda' else torch.device(kind)
    return Machine(rank, world, device, launcher=launcher)


def take_gpu(local: int) -> None:
    """Makes the GPU of the process with this rank on its machine the one it uses; UserError if there is none."""
    if local >= torch.cuda.device_count():
        raise UserError(f'process {local} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()} here. '
                        'Start fewer processes, or use --device=cpu')
    torch.cuda.set_device(local)


def torchrun_ranks() -> tuple[int, int, int, int]:
    """(rank, number of processes, rank on this machine, processes on this machine) as torchrun says in the environment.

    (0, 1, 0, 1) without it.
    """
    defaults = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
    texts = {name: os.environ.get(name, default) for name, default in defaults.items()}
    if all(re.fullmatch('[0-9]{1,7}', text) for text in texts.values()):
        rank, world, local, local_world = map(int, texts.values())
        if rank < world and local < local_world:
            return rank, world, local, local_world
    given = ', '.join(f'{name}={text!r}' for name, text in texts.items())
    raise UserError(f'the environment has {given}: expected the numbers that torchrun sets. For one process: unset '
                    f'{" ".join(defaults)}')


def join_processes(backend: str) -> None:
    """Joins torchrun's processes; UserError if something else started them."""
    try:
        dist.init_process_group(backend)
    except ValueError as error:  # no MASTER_ADDR, for one
        raise UserError(f'the processes cannot be joined: start them with torchrun. {error}')


def keep_freed_memory() -> None:
    """Tells glibc to keep freed blocks instead of returning them to the kernel: page faults slow CPU training."""
    if sys.platform == 'linux' and platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL('libc.so.6')
        for parameter, value in ((-3, 2 ** 31 - 1), (-1, 2 ** 31 - 1), (-2, 2 ** 28)):  # mmap, trim thresholds, top pad
            libc.mallopt(parameter, value)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: a process forked from one that used OpenMP's others would wait for these in vain."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def is_faster(f, g, x, share: float = 0.9, seconds: float = 0.002, clock=time.perf_counter) -> bool:
    """Whether f(x) takes less than this share of the time of g(x), by `clock`.

    They take turns for `seconds`, three times at least; the least time of each counts, as other programs only add to
    it.
    """
    least, rounds, begun = {f: math.inf, g: math.inf}, 0, clock()
    while rounds < 3 or clock() - begun < seconds:
        for side in (f, g):
            start = clock()
            side(x)
            least[side] = min(least[side], clock() - start)
        rounds += 1
    return least[f] < share * least[g]


def cpu_facts() -> dict[str, str]:
    """{'model name', 'flags'} of a processor, or what an ARM has for these, as Linux tells them; else empty."""
    cpuinfo = Path('/proc/cpuinfo')
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    told = 'model name', 'flags', 'CPU part', 'Features'
    facts = [line.partition(':')[::2] for line in lines if line.startswith(told)]
    return {name.strip(): value.strip() for name, value in reversed(facts)}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s the device can reach: from its data sheet, else by timing a large product in this dtype."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        for name, flops in PEAK_FLOPS.items():
            if re.search(rf'\b{name}\b', torch.cuda.get_device_name(device)):
                return flops
    n = 8192 if device.type == 'cuda' else 1024
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float('inf')
    for _ in range(8):
        start = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best


def peak_memory(device: torch.device) -> int | None:
    """Bytes that this process has held at most: on the GPU, else on the host. None where the system does not tell."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---- terminal and signals ----

def make_progress() -> Callable[[str], None]:
    """A function that shows a line: one updating line on a terminal, elsewhere a line every ten seconds."""
    shown = 0.0

    def progress(line):
        nonlocal shown
        if sys.stdout.isatty():
            show(f'\r{line:<100}', end='')
        elif time.time() - shown > 10:
            shown = time.time()
            show(line)
    return progress


def say(line: str) -> None:
    """A line of its own that stays, above the updating one."""
    show(f'\r{line:<100}' if sys.stdout.isatty() else line)


def show(text: str, end: str = '\n') -> None:
    """Prints. Where nobody can read it any more, that is a hang-up, as of a terminal: see `caught_signals`."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        signal.raise_signal(HANG_UP)


@functools.cache
def no_bars_in_logs() -> None:
    """No progress bars of libraries where stderr is no terminal: a log would get every state of each.

    lm-eval and datasets say themselves whether a bar is shown, so an option or an environment variable is not enough.
    """
    if sys.stderr.isatty():
        return
    from tqdm import tqdm
    start = tqdm.__init__
    tqdm.__init__ = lambda bar, *args, **options: start(bar, *args, **{**options, 'disable': True})


@contextmanager
def caught_signals() -> Iterator[list]:
    """A list that the first SIGINT, SIGTERM or SIGHUP makes non-empty.

    A second SIGINT or SIGTERM ends the program as usual; a second SIGHUP does not, as a terminal that hangs up sends
    one and fails each line that is shown. What is ignored stays so: nohup ignores SIGHUP.
    """
    stop = []

    def on_signal(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_IGN if number == HANG_UP else signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, HANG_UP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
