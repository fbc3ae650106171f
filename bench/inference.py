"""Prefill and decoding of the SPS family by the paper's protocol (table 2): speed and memory as ratios to Standard's.

    python -m bench.inference                    on a GPU: five scales, 16 sequences, 1024 tokens read, 3072 decoded
    python -m bench.inference --scales=xs,s --methods=sps,sps_window_0 --batch=4 --prompt=256 --new=128
    python -m bench.inference --toy

Weights are random, in fp32, as the paper's memory column implies, or in bf16 with --dtype=bfloat16. On a GPU products
and cache are in bf16 either way, and each method decodes as a CUDA graph. Speed: one process per scale, the methods
take turns, one round to warm up, then the median of `rounds`. Memory: a process for each method, relative to what it
held before it made the model. 'held' is what the paper calls its peak: weights and cache, measured after decoding.
'peak' is the most that was held at any moment. Both through decoding.generate.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bench import DEVICE, FAMILY, GPU, TOY_SHAPE, alternate, apart, make_model, measure, over_standard, resident
from common.decoding import generate
from common.files import ROOT, UserError
from common.settings import read_config_file


@dataclass
class Settings:
    """Defaults on a GPU are the paper's protocol, on a CPU something that ends."""

    scales: str = 'xs,s,m,l,xl' if GPU else 'xs'  # sizes, as config/standard_<scale>.py has them
    methods: str = 'two_x_memory,delayed_state,sps'  # beside Standard; also reverse_sps and sps_window_0
    batch: int = 16 if GPU else 4  # sequences
    prompt: int = 1024 if GPU else 256  # tokens of each that are read
    new: int = 3072 if GPU else 128  # tokens of each that are decoded
    dtype: Literal['float32', 'bfloat16'] = 'float32'  # of the weights
    rounds: int = 2  # timed, after one to warm up
    toy: bool = False  # a few seconds, at sizes that tell nothing; writes nothing

    def __post_init__(self):
        if self.toy:
            self.scales, self.batch, self.prompt, self.new = 'toy', 2, 8, 4
        self.names = list(dict.fromkeys(['standard', *self.methods.split(',')]))
        for name in self.names:
            if name not in FAMILY:
                raise UserError(f'methods has {name!r}: expected {", ".join(FAMILY)}')


def shape_of(scale: str) -> dict[str, int]:
    if scale == 'toy':
        return TOY_SHAPE
    values = read_config_file(f'{ROOT}/config/standard_{scale}.py')
    return {name: values[name] for name in ('n_layer', 'n_head', 'n_embd')}


def ready_model(name: str, scale: str, s: Settings):
    return make_model(name, **shape_of(scale)).eval().to(getattr(torch, s.dtype))


def decode(model, n_new: int, s: Settings):
    """Generate greedily, and return the cache. On a GPU it is in bf16, like the products of fp32 weights."""
    cache = model.new_cache(s.batch, s.prompt + n_new, dtype=torch.bfloat16 if GPU else None)
    # without autocast's own cache, which would hold a bf16 copy of the weights
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU and s.dtype == 'float32', cache_enabled=False):
        generate(model, [[7] * s.prompt] * s.batch, n_new, temperature=0, cache=cache)
    return cache


def memory(name: str, scale: str, s: Settings) -> dict[str, int]:
    """Bytes {'held', 'peak', 'cache'} of generating once with this method; to be called in a fresh process."""
    torch.zeros(1, device=DEVICE)
    before = resident()['held']
    model = ready_model(name, scale, s)
    if GPU:  # the peak starts again, at what is held
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    cache = decode(model, s.new, s)
    return {what: n - before for what, n in resident().items()} | {'cache': cache.nbytes}


def speed(scale: str, s: Settings) -> Iterator[dict]:
    models = {name: ready_model(name, scale, s) for name in s.names}
    for what, n_new in (('end to end', s.new), ('prefill', 1)):
        sides = {name: lambda model=model, n_new=n_new: decode(model, n_new, s) for name, model in models.items()}
        seconds = alternate(sides, s.rounds, warmup=1)
        n_tokens = s.batch * (n_new if what == 'end to end' else s.prompt)
        yield {'scale': scale, 'dtype': s.dtype, 'what': f'throughput, {what}',
               'standard tokens/s': round(n_tokens / seconds['standard'], 1),
               **{name: round(1 / ratio, 3) for name, ratio in over_standard(seconds).items()}}


def figures(**values) -> Iterator[dict]:
    s = Settings(**values)
    for scale in s.scales.split(','):
        yield from speed(scale, s)
        used = {name: memory(name, scale, s) if s.toy else apart(memory, name, scale, s) for name in s.names}
        for what in ('held', 'peak', 'cache'):
            n_bytes = {name: of_method[what] for name, of_method in used.items()}
            n_bytes['standard'] = max(1, n_bytes['standard'])  # at toy size it may be nothing
            yield {'scale': scale, 'dtype': s.dtype, 'what': f'memory, {what}',
                   'standard MiB': round(n_bytes['standard'] / 2 ** 20, 1), **over_standard(n_bytes)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, Settings, inference=figures)


if __name__ == '__main__':
    main()
