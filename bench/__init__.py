"""Side-by-side benchmarks. Machines are shared and noisy, so both sides take turns and the figure is their ratio.

    python -m bench.train_step      a training step compared with Hugging Face Llama; nanogpt: with nanoGPT's shape;
                                    objectives: NextLat, MTP and JTP compared with next-token training
    python -m bench.generate        decoding compared with Hugging Face generate
    python -m bench.inference       prefill and decoding of the SPS family: speed and memory relative to Standard
    python -m bench.attention       attention on a CPU or GPU compared with PyTorch's own calls
    python -m bench.scans           GPN and Gated DeltaNet: the fast forms compared with the loop over the equations
    python -m bench.context_ready   backpropagation through time, and few wide layers, compared with the plain forms
    python bench/gpu.py             everything that needs a GPU, tests included, in order of need

Each prints its figures as they come and writes them, with device, date, versions and commit, to bench/results/. With
--toy it takes seconds, at meaningless sizes, and writes nothing.
"""
import datetime
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

from common import runs

RESULTS = Path(__file__).parent / 'results'
FAMILY = {  # the SPS paper's methods: (model file, what differs from its defaults)
    'standard': ('standard', {}),
    'sps': ('sps', {}),
    'sps_window_0': ('sps', {'window': 0}),
    'two_x_memory': ('sps', {'method': 'two_x_memory', 'window': None}),
    'delayed_state': ('sps', {'method': 'delayed_state'}),
    'reverse_sps': ('sps', {'method': 'reverse_sps'}),
}


def make_model(name: str, **values):
    """Return a model of FAMILY with seed 0, on the GPU if there is one."""
    file, own = FAMILY[name]
    torch.manual_seed(0)
    module = runs.model_file(file)
    return module.Model(module.Config(**own, **values)).to('cuda' if torch.cuda.is_available() else 'cpu')


def over_standard(seconds: dict[str, float]) -> dict[str, float]:
    """Return {name: times Standard's} of {name: seconds}."""
    return {name: round(s / seconds['standard'], 3) for name, s in seconds.items() if name != 'standard'}


def alternate(sides: dict, rounds: int, warmup: int = 2) -> dict[object, float]:
    """Return {name: median seconds} of {name: function}, the sides taking turns."""
    return {name: statistics.median(times) for name, times in alternate_times(sides, rounds, warmup).items()}


def alternate_times(sides: dict, rounds: int, warmup: int = 2) -> dict[object, list[float]]:
    """Return {name: seconds in every round} of {name: function}, the sides taking turns."""
    times = {name: [] for name in sides}
    for i in range(warmup + rounds):
        for name, function in sides.items():
            progress(f'round {i + 1} of {warmup + rounds}: {name}')
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    progress('')
    return times


def progress(text: str) -> None:
    """Show what is being measured, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f'\r\x1b[K{text}', end='', file=sys.stderr, flush=True)


def resident() -> dict[str, int]:
    """Return {'peak', 'held'} in bytes of GPU memory; without a GPU, of this process's memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return {'peak': torch.cuda.max_memory_allocated(), 'held': torch.cuda.memory_allocated()}
    status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())
    return {k: int(status[field].split()[0]) * 1024 for k, field in (('peak', 'VmHWM'), ('held', 'VmRSS'))}


def apart(function: Callable, *args, **environment: str):
    """Return function(*args), called in a fresh process with these environment variables added.

    Its peak memory is that of this call alone. The rows of a generator function come as a list.
    """
    progress(f'{function.__name__}{args}, in a process of its own')
    spawn = multiprocessing.get_context('spawn')
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(_call, function, *args).result()


def _call(function, *args):
    result = function(*args)
    return [*result] if isinstance(result, Iterator) else result


def device_name() -> str:
    """Return the name of the GPU, or of the CPU with its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path('/proc/cpuinfo')
    named = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    return f'{named[1] if named else platform.processor()}, {torch.get_num_threads()} threads'


def where_and_when() -> dict:
    """Return {'device', 'date', 'commit', 'versions'} of a measurement."""
    import transformers
    describe = ['git', 'describe', '--always', '--dirty']
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    versions = {'python': platform.python_version(), 'torch': torch.__version__,
                'transformers': transformers.__version__}
    return {'device': device_name(), 'date': datetime.date.today().isoformat(), 'commit': commit or 'unknown',
            'versions': versions}


def one_line(about: dict) -> str:
    """Return 'device; date; commit; versions' of `where_and_when`."""
    versions = ', '.join(f'{name} {version}' for name, version in about['versions'].items())
    return f'{about["device"]}; {about["date"]}; commit {about["commit"]}; {versions}'


def markdown_table(rows: list[dict]) -> str:
    """Return rows (dicts) as Markdown tables, one for each run of rows with the same columns."""
    lines, columns = [], None
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines += ['', '| ' + ' | '.join(columns) + ' |', '|' + '---|' * len(columns)]
        lines.append('| ' + ' | '.join(str(x) for x in row.values()) + ' |')
    return '\n'.join(lines[1:])


def show(row: dict) -> dict:
    """Print a row of figures and return it."""
    progress('')
    print('  '.join(f'{k} {v}' for k, v in row.items()), flush=True)
    return row


def options(argv: list[str] | None, *known: str) -> set[str]:
    """Return the given arguments: argv, or those of the command line. Exit with a message for unknown ones.

    Words without -- choose what is measured, one at a time.
    """
    given = set(sys.argv[1:] if argv is None else argv)
    words = [arg for arg in known if not arg.startswith('--')]
    for arg in given - set(known):
        sys.exit(f'unknown argument {arg!r}: expected {", ".join(known)} or nothing')
    if len(given & set(words)) > 1:
        sys.exit(f'too many measurements: {", ".join(sorted(given))}: expected one of {", ".join(words)}')
    return given


def write_results(name: str, rows: Iterable[dict], markdown: bool = False, toy: bool = False) -> None:
    """Print rows (dicts) as they come and write them to bench/results/<name>_<cpu or gpu>.json, with where and when.

    Until the last row they are in <name>_<cpu or gpu>.partial.json, which remains if the benchmark is stopped.
    markdown: also write a table, to the same name with .md. toy: only print.
    """
    path = RESULTS / f'{name}_{"gpu" if torch.cuda.is_available() else "cpu"}.json'
    partial, about, found = path.with_suffix('.partial.json'), None, []
    for row in rows:
        found.append(show(row))
        if not toy:
            about = about or where_and_when()
            RESULTS.mkdir(exist_ok=True)
            partial.write_text(json.dumps(about | {'rows': found}, indent=1) + '\n')
    if toy or not found:
        return
    partial.replace(path)
    if markdown:
        path.with_suffix('.md').write_text(f'{one_line(about)}\n\n{markdown_table(found)}\n')
    print(f'written to {path}')
