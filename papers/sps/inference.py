"""Prefill and decoding of the SPS family, relative to Standard (SPS paper, table 2).

    python -m papers.sps.inference         on a GPU: five scales, 16 sequences of 1024 + 3072 tokens
    python -m papers.sps.inference --scales=xs,s --batch=4 --new=128

The defaults on a GPU are the paper's protocol. Weights are random, in fp32 (as the paper's memory
column implies) or bf16. On a GPU, matmuls and cache are in bf16 either way, and each method decodes
with CUDA graphs. Speed: the methods take turns in one process; medians of two rounds after a
warm-up round. Memory: one process per method, minus what was used before the model was made. 'held'
is the paper's peak, weights and cache after decoding; 'peak' is the highest value at any moment,
with the bf16 copies of fp32 weights that autocast keeps.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from bench import reporting, speed
from bench.timing import DEVICE, GPU, alternate, isolated, memory_of
from lm_architectures.decode.generation import generate
from lm_architectures.settings import check_ranges

METHODS = {'standard': '--model=standard', 'two_x_memory': '--model=sps --method=two_x_memory --window=None',
           'delayed_state': '--model=sps --method=delayed_state', 'sps': '--model=sps'}  # of table 2


@dataclass
class Settings(reporting.Settings):
    scales: tuple[str, ...] = ('xs', 's', 'm', 'l', 'xl') if GPU else ('xs',)  # sizes: config/standard_<scale>.py
    batch: int = 16 if GPU else 4  # number of sequences
    prompt: int = 1024 if GPU else 256  # prompt tokens per sequence
    new: int = 3072 if GPU else 128  # decoded tokens per sequence
    dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of the weights

    def __post_init__(self):
        check_ranges(self, batch=1, prompt=1, new=1)


def make_decoder(method: str, scale: str, s: Settings) -> Callable:
    """Return a function that generates n tokens greedily and returns the cache."""
    model, *_ = speed.make_model(f'config/standard_{scale}.py {METHODS[method]}')
    model = model.eval().to(getattr(torch, s.dtype))

    def decode(n_new=s.new):
        cache = model.new_cache(s.batch, s.prompt + n_new, dtype=torch.bfloat16 if GPU else None)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU and s.dtype == 'float32'):
            generate(model, [[7] * s.prompt] * s.batch, n_new, temperature=0, cache=cache)
        return cache
    return decode


def memory(method: str, scale: str, s: Settings) -> dict[str, int]:
    """Return {'held', 'peak', 'cache'} in bytes for one generation. Call it in a new process."""
    used, cache = memory_of(lambda: make_decoder(method, scale, s))
    return used | {'cache': cache.nbytes}


def over_standard(values: dict[str, float]) -> dict[str, float]:
    """Return the values of the other methods divided by Standard's."""
    return {name: round(value / values['standard'], 3) for name, value in values.items() if name != 'standard'}


def throughput_and_memory(s: Settings) -> Iterator[dict]:
    """Yield rows of end-to-end and prefill throughput, then of memory, for each scale."""
    for scale in s.scales:
        decoders = {method: make_decoder(method, scale, s) for method in METHODS}
        for what, n_new, n_tokens in (('end to end', s.new, s.new), ('prefill', 1, s.prompt)):
            sides = {method: partial(decode, n_new) for method, decode in decoders.items()}
            seconds = alternate(sides, rounds=2, warmup=1)
            yield {'scale': scale, 'dtype': s.dtype, 'what': f'throughput, {what}',
                   'standard tokens/s': round(s.batch * n_tokens / seconds['standard'], 1),
                   **{name: round(1 / ratio, 3) for name, ratio in over_standard(seconds).items()}}
        del decoders, sides
        used = {method: isolated(memory, method, scale, s) for method in METHODS}
        for what in ('held', 'peak', 'cache'):
            n_bytes = {method: values[what] for method, values in used.items()}
            yield {'scale': scale, 'dtype': s.dtype, 'what': f'memory, {what}',
                   'standard MiB': round(n_bytes['standard'] / 2 ** 20, 1), **over_standard(n_bytes)}


def main(argv: list[str] | None = None) -> None:
    reporting.report(argv, Settings, throughput_and_memory)


if __name__ == '__main__':
    main()
