"""Side-by-side benchmarks. Both sides take turns, and noise cancels in the ratio of their times.

    python -m bench.profile s       a training step of Standard, then of SPS: speed, memory, kernels
    python -m bench.train_step      training steps, compared with Hugging Face Llama;
                                    `objectives`: NextLat, MTP, JTP, BST, relative to GPT
    python -m bench.generate        decoding, compared with Hugging Face generate
    python -m papers.sps.inference       prefill and decoding of the SPS family, relative to Standard
    python -m bench.attention       attention, compared with PyTorch's own calls
    python -m bench.scans           fast forms of GPN, GDN and Context-Ready, compared with loops
    python -m papers.context_ready.generation   generation by Context-Ready, compared with a Roformer
    python -m bench.gpu             everything that needs a GPU, including tests

Results are printed as they are measured and written to bench/results/ with command, device, date,
versions and commit. --toy takes seconds, at meaningless sizes, and writes nothing.
"""
import sys

from lm_architectures.start import quiet_start

if sys.argv[0] == '-m':  # Python is importing this package for `python -m bench.NAME`
    quiet_start()

import datetime
import itertools
import json
import multiprocessing
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lm_architectures.decode.generation import Decoder, allocate_cache, decodable
from lm_architectures.files import UserError, command, friendly_errors
from lm_architectures.run import models
from lm_architectures.settings import load_settings

RESULTS = Path(__file__).parent / 'results'
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
GPU = DEVICE.type == 'cuda'
TOY_SHAPE = dict(n_layer=1, n_head=2, n_embd=32)
FAMILY = {  # the SPS paper's methods: (model file, Config values)
    'standard': ('standard', {}),
    'sps': ('sps', {}),
    'sps_window_0': ('sps', {'window': 0}),
    'two_x_memory': ('sps', {'method': 'two_x_memory', 'window': None}),
    'delayed_state': ('sps', {'method': 'delayed_state'}),
    'reverse_sps': ('sps', {'method': 'reverse_sps'}),
}


def make_model(name: str, **values):
    """Return a model of FAMILY with random weights (seed 0), on the GPU if there is one."""
    file, own = FAMILY[name]
    torch.manual_seed(0)
    module = models.model_file(file)
    return module.Model(module.Config(**own, **values)).to(DEVICE)


def over_standard(seconds: dict[str, float]) -> dict[str, float]:
    """Return {name: seconds} of the other methods divided by Standard's seconds."""
    return {name: round(s / seconds['standard'], 3) for name, s in seconds.items() if name != 'standard'}


def graphed(function: Callable, calls: int = 10) -> Callable:
    """Return a function that runs `function` `calls` times as one CUDA graph.

    Without launches from Python between them, the time is that of the kernels.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


def alternate(sides: dict, rounds: int, warmup: int = 2) -> dict[object, float]:
    """Time {name: function}, the functions taking turns. Returns {name: median seconds}."""
    times = {name: [] for name in sides}
    for i in range(warmup + rounds):
        for name, function in sides.items():
            start = time.perf_counter()
            function()
            if GPU:
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


@torch.inference_mode()
def decoding_speeds(models: dict, contexts, n_tokens: int, rounds: int = 5, step=Decoder.next_tokens) -> dict:
    """Return {(name, context): tokens/s} of batch size 1 after `context` random tokens.

    Medians over rounds of n_tokens, after a warm-up round. step(decoder) decodes one token.
    """
    sides = {}
    for (name, model), context in itertools.product(models.items(), contexts):
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(model.config.n_ids, (1, context), generator=generator).to(model.embed.weight.device)
        model = decodable(model)
        cache = allocate_cache(model, prompt.tolist(), (rounds + 1) * n_tokens)
        for part in prompt[:, :-1].split(1024, 1):
            model.extend(part, cache)
        decoder = Decoder(model, prompt[:, -1:].tolist(), cache, 0, {'temperature': 0})
        sides[name, context] = lambda decoder=decoder: [step(decoder) for _ in range(n_tokens)]
    return {side: n_tokens / seconds for side, seconds in alternate(sides, rounds, warmup=1).items()}


def resident() -> dict[str, int]:
    """Return {'peak', 'held'}: bytes of GPU memory, or of this process's memory without a GPU."""
    if GPU:
        torch.cuda.synchronize()
        return {'peak': torch.cuda.max_memory_allocated(), 'held': torch.cuda.memory_allocated()}
    status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())
    return {k: int(status[field].split()[0]) * 1024 for k, field in (('peak', 'VmHWM'), ('held', 'VmRSS'))}


def isolated(function: Callable, *args):
    """Call function(*args) in a new process and return its result. Used to measure peak memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(function, *args).result()


def where_and_when() -> dict:
    """Return {'device', 'date', 'commit', 'versions'} of a measurement."""
    import transformers
    cpuinfo = Path('/proc/cpuinfo')
    named = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = f'{named[1] if named else platform.processor()}, {torch.get_num_threads()} threads'
    describe = ['git', 'describe', '--always', '--dirty']
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    versions = {'python': platform.python_version(), 'torch': torch.__version__,
                'transformers': transformers.__version__}
    return {'device': torch.cuda.get_device_name() if GPU else cpu, 'date': datetime.date.today().isoformat(),
            'commit': commit or 'unknown', 'versions': versions}


def one_line(about: dict) -> str:
    """Format `where_and_when` as 'device; date; commit; versions'."""
    versions = ', '.join(f'{name} {version}' for name, version in about['versions'].items())
    return f'{about["device"]}; {about["date"]}; commit {about["commit"]}; {versions}'


@dataclass
class Settings:
    toy: bool = False  # run for seconds, at meaningless sizes, and write nothing


def measure(argv: list[str] | None, settings: type = Settings, prefix: str = '',
            **measurements: Callable[..., Iterable[dict]]) -> None:
    """Run the measurement named in argv, or the first, with all settings. Writes its rows.

    prefix: what the name of the file with the results starts with.
    """
    with friendly_errors(argv):
        s, names, _ = load_settings(settings, argv)
        name, *others = names or measurements
        if name not in measurements or (names and others):
            raise UserError(f'unexpected {" ".join(names)!r}: expected one of {", ".join(measurements)}')
        write_results(prefix + name, measurements[name](**asdict(s)), toy=s.toy)


def write_results(name: str, rows: Iterable[dict], toy: bool = False) -> None:
    """Print rows (dicts) as they arrive and write them to bench/results/NAME_DEVICE.json.

    If interrupted, NAME_DEVICE.partial.json has the rows so far. toy: only print.
    """
    path = RESULTS / f'{name}_{"gpu" if GPU else "cpu"}.json'
    partial, about, found = path.with_suffix('.partial.json'), None, []
    for row in rows:
        found.append(row)
        print('  '.join(f'{k} {v}' for k, v in row.items()), flush=True)
        if not toy:
            module = f'bench.{Path(sys.argv[0]).stem}'
            about = about or {'command': command('-m', module, *sys.argv[1:])} | where_and_when()
            RESULTS.mkdir(exist_ok=True)
            partial.write_text(json.dumps(about | {'rows': found}, indent=1) + '\n')
    if toy or not found:
        return
    partial.replace(path)
    print(f'written to {path}')
