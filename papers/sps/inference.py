"""Prefill and decoding of the SPS family, relative to Standard (SPS paper, table 2).

    python -m papers.sps.inference         on a GPU: five scales, 16 sequences of 1024 + 3072 tokens
    python -m papers.sps.inference --scales=xs,s --batch=4 --new=128
    python -m papers.sps.inference --toy

The defaults on a GPU are the paper's protocol. Weights are random, in fp32 (as the paper's memory
column implies) or bf16. On a GPU, matmuls and cache are in bf16 either way, and each method decodes
with CUDA graphs. Speed: the methods take turns in one process; medians of two rounds after a
warm-up round. Memory: one process per method, minus what was used before the model was made. 'held'
is the paper's peak, weights and cache after decoding; 'peak' is the highest value at any moment,
with the bf16 copies of fp32 weights that autocast keeps.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bench import DEVICE, GPU, TOY_SHAPE, alternate, isolated, make_model, measure, over_standard, resident
from lm_architectures.decode.generation import generate
from lm_architectures.files import ROOT
from lm_architectures.settings import check_ranges, read_config_file

METHODS = 'standard', 'two_x_memory', 'delayed_state', 'sps'  # of table 2


@dataclass
class Settings:
    scales: tuple[str, ...] = ('xs', 's', 'm', 'l', 'xl') if GPU else ('xs',)  # sizes: config/standard_<scale>.py
    batch: int = 16 if GPU else 4  # number of sequences
    prompt: int = 1024 if GPU else 256  # prompt tokens per sequence
    new: int = 3072 if GPU else 128  # decoded tokens per sequence
    dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of the weights
    toy: bool = False  # run for seconds, at meaningless sizes, and write nothing

    def __post_init__(self):
        if self.toy:
            self.scales, self.batch, self.prompt, self.new = ('toy',), 2, 8, 4
        check_ranges(self, batch=1, prompt=1, new=1)


def ready_model(name: str, scale: str, s: Settings):
    """Return a method's model at a scale, ready for inference."""
    values = TOY_SHAPE if s.toy else read_config_file(f'{ROOT}/config/standard_{scale}.py')
    shape = {key: values[key] for key in TOY_SHAPE}
    return make_model(name, **shape).eval().to(getattr(torch, s.dtype))


def decode(model, n_new: int, s: Settings):
    """Generate greedily and return the cache, which is in bf16 on a GPU."""
    cache = model.new_cache(s.batch, s.prompt + n_new, dtype=torch.bfloat16 if GPU else None)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU and s.dtype == 'float32'):
        generate(model, [[7] * s.prompt] * s.batch, n_new, temperature=0, cache=cache)
    return cache


def memory(name: str, scale: str, s: Settings) -> dict[str, int]:
    """Return {'held', 'peak', 'cache'} in bytes for one generation. Call it in a new process."""
    torch.zeros(1, device=DEVICE)
    before = resident()['held']
    model = ready_model(name, scale, s)
    if GPU:  # reset the peak
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    cache = decode(model, s.new, s)
    return {what: n - before for what, n in resident().items()} | {'cache': cache.nbytes}


def speed(scale: str, s: Settings) -> Iterator[dict]:
    """Yield rows of end-to-end and prefill throughput."""
    models = {name: ready_model(name, scale, s) for name in METHODS}
    for what, n_new in (('end to end', s.new), ('prefill', 1)):
        sides = {name: lambda model=model, n_new=n_new: decode(model, n_new, s) for name, model in models.items()}
        seconds = alternate(sides, 2, warmup=1)
        n_tokens = s.batch * (n_new if what == 'end to end' else s.prompt)
        yield {'scale': scale, 'dtype': s.dtype, 'what': f'throughput, {what}',
               'standard tokens/s': round(n_tokens / seconds['standard'], 1),
               **{name: round(1 / ratio, 3) for name, ratio in over_standard(seconds).items()}}


def figures(**values) -> Iterator[dict]:
    s = Settings(**values)
    for scale in s.scales:
        yield from speed(scale, s)
        used = {name: memory(name, scale, s) if s.toy else isolated(memory, name, scale, s) for name in METHODS}
        for what in ('held', 'peak', 'cache'):
            n_bytes = {name: of_method[what] for name, of_method in used.items()}
            n_bytes['standard'] = max(1, n_bytes['standard'])  # may be 0 at toy size
            yield {'scale': scale, 'dtype': s.dtype, 'what': f'memory, {what}',
                   'standard MiB': round(n_bytes['standard'] / 2 ** 20, 1), **over_standard(n_bytes)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, Settings, inference=figures)


if __name__ == '__main__':
    main()
