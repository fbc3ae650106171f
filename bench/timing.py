"""Time and memory of functions."""
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
GPU = DEVICE.type == 'cuda'


def alternate(sides: dict, rounds: int, warmup: int = 2, calls: int = 1) -> dict[object, float]:
    """Time {name: function}, the functions taking turns. Returns {name: median seconds of a call}.

    calls: per turn. On a GPU, the next call is prepared while one runs.
    """
    times = {name: [] for name in sides}
    for i in range(warmup + rounds):
        for name, function in sides.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if GPU:
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def isolated(function: Callable, *args):
    """Call function(*args) in a new process and return its result. Used to measure peak memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(function, *args).result()


def memory() -> dict[str, int]:
    """Return {'peak', 'held'}: bytes of GPU memory, or of this process's memory without a GPU."""
    if GPU:
        torch.cuda.synchronize()
        return {'peak': torch.cuda.max_memory_allocated(), 'held': torch.cuda.memory_allocated()}
    status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())
    return {k: int(status[field].split()[0]) * 1024 for k, field in (('peak', 'VmHWM'), ('held', 'VmRSS'))}


def memory_of(make: Callable) -> tuple:
    """Return the `memory` that make()() takes, and its result. Call it in a new process.

    The peak is that of the call. What make() needs only while it runs does not count.
    """
    torch.zeros(1, device=DEVICE)
    before = memory()['held']
    function = make()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    result = function()
    return {what: n - before for what, n in memory().items()}, result
