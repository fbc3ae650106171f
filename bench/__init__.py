"""Side-by-side measurements: the sides take turns, and noise cancels in the ratio of their times.

    python -m bench.speed                       training steps and decoding of any models
    python -m papers.sps.inference              prefill and decoding (SPS paper, table 2)
    python -m papers.context_ready.generation   generation (Context-Ready paper, table A13)

This file has what these programs share. bench/results/ has the measurements that the pages cite.
"""
import sys

from lm_architectures.start import quiet_start

if sys.argv[0] == '-m':  # Python is importing this package for `python -m bench.speed`
    quiet_start()

import datetime
import json
import multiprocessing
import platform
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from lm_architectures.files import UserError, friendly_errors
from lm_architectures.settings import load_settings

RESULTS = Path(__file__).parent / 'results'
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
GPU = DEVICE.type == 'cuda'


@dataclass
class Settings:
    toy: bool = False  # run for seconds, at meaningless sizes
    out: str | None = None  # write the rows to bench/results/NAME_cpu.json or NAME_gpu.json; None: only print them


# ---- measuring ----

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


# ---- results ----

def where_and_when() -> dict:
    """Return {'device', 'date', 'commit', 'versions'} of a measurement."""
    cpuinfo = Path('/proc/cpuinfo')
    named = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = f'{named[1] if named else platform.processor()}, {torch.get_num_threads()} threads'
    describe = ['git', 'describe', '--always', '--dirty']
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    versions = {'python': platform.python_version()} | {name: version(name) for name in ('torch', 'transformers')}
    return {'device': torch.cuda.get_device_name() if GPU else cpu, 'date': datetime.date.today().isoformat(),
            'commit': commit or 'unknown', 'versions': versions}


def one_line(about: dict) -> str:
    """Format `where_and_when` as 'device; date; commit; versions'."""
    versions = ', '.join(f'{name} {number}' for name, number in about['versions'].items())
    return f'{about["device"]}; {about["date"]}; commit {about["commit"]}; {versions}'


def measure(argv: list[str] | None, settings: type, rows: Callable[..., Iterable[dict]], takes_arguments=False):
    """Print the dicts of rows(settings, *arguments) as they arrive, and write them to --out.

    An interrupted measurement leaves NAME_cpu.partial.json. argv None: the process's arguments.
    """
    with friendly_errors(argv):
        s, arguments, _ = load_settings(settings, argv)
        if arguments and not takes_arguments:
            raise UserError(f'unexpected {arguments[0]!r}: expected settings as --key=value, see --help')
        path, found = RESULTS / f'{s.out}_{"gpu" if GPU else "cpu"}.json', []
        if path.exists():
            raise UserError(f'{path} already exists: choose another --out')
        partial = path.with_suffix('.partial.json')
        for row in rows(s, *arguments):
            found.append(row)
            print('  '.join(f'{k} {v}' for k, v in row.items()), flush=True)
            if s.out:
                about = {'command': shlex.join(['python', *sys.orig_argv[1:]])} | where_and_when()
                partial.write_text(json.dumps(about | {'rows': found}, indent=1) + '\n')
        if s.out:
            partial.replace(path)
            print(f'written to {path}')
