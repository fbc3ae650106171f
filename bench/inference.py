"""Prefill and decoding of the SPS family by the paper's protocol (table 2): speed and memory as ratios to Standard's.

    python -m bench.inference                    on a GPU: five scales, 16 sequences, 1024 tokens read, 3072 decoded
    python -m bench.inference --scales=xs,s --methods=sps,sps_window_0 --batch=4 --prompt=256 --new=128
    python -m bench.inference --toy

Weights are random, in bf16 on a GPU and fp32 on a CPU (the paper: fp32 with a bf16 cache, where the cache weighs less).
On a GPU each method decodes as a CUDA graph. Speed: one process per scale, the methods take turns, one round to warm
up, then the median of `rounds`. Memory: a process for each method, relative to what it held before it made the model.
'held' is what the paper calls its peak: weights and cache, measured after decoding. 'peak' is the most that was held at
any moment. Both through decoding.generate.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import FAMILY, alternate, apart, make_model, over_standard, resident, write_results
from common.decoding import allocate_cache, generate
from common.files import ROOT, UserError, friendly_errors
from common.settings import load_settings, read_config_file

GPU = torch.cuda.is_available()
TOY = dict(n_layer=1, n_head=2, n_embd=32)


@dataclass
class Settings:
    """Defaults on a GPU are the paper's protocol, on a CPU something that ends."""

    scales: str = 'xs,s,m,l,xl' if GPU else 'xs'  # sizes, as config/standard_<scale>.py has them
    methods: str = 'two_x_memory,delayed_state,sps'  # beside Standard; also reverse_sps and sps_window_0
    batch: int = 16 if GPU else 4  # sequences
    prompt: int = 1024 if GPU else 256  # tokens of each that are read
    new: int = 3072 if GPU else 128  # tokens of each that are decoded
    rounds: int = 2  # timed, after one to warm up
    toy: bool = False  # a few seconds, at sizes that tell nothing; writes nothing


def shape_of(scale: str) -> dict[str, int]:
    if scale == 'toy':
        return TOY
    values = read_config_file(f'{ROOT}/config/standard_{scale}.py')
    return {name: values[name] for name in ('n_layer', 'n_head', 'n_embd')}


def method_names(s: Settings) -> list[str]:
    """Standard and the methods beside it; UserError for an unknown one."""
    names = s.methods.split(',')
    for name in names:
        if name not in FAMILY:
            raise UserError(f'methods has {name!r}: expected {", ".join(FAMILY)}')
    return list(dict.fromkeys(['standard', *names]))


def prompts_of(s: Settings) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 50256, (s.batch, s.prompt), generator=generator).tolist()


def ready_model(name: str, scale: str):
    return make_model(name, **shape_of(scale)).eval().to(torch.bfloat16 if GPU else torch.float32)


def memory(name: str, scale: str, s: Settings) -> dict[str, int]:
    """Bytes {'held', 'peak', 'cache'} of generating once with this method; to be called in a fresh process."""
    torch.zeros(1, device='cuda' if GPU else 'cpu')
    before = resident()['held']
    model, prompts = ready_model(name, scale), prompts_of(s)
    cache = allocate_cache(model, prompts, s.new)
    if GPU:  # the peak starts again, at what is held
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    generate(model, prompts, s.new, temperature=0, cache=cache)
    return {what: n - before for what, n in resident().items()} | {'cache': cache.nbytes}


def speed(scale: str, s: Settings) -> Iterator[dict]:
    models, prompts = {name: ready_model(name, scale) for name in method_names(s)}, prompts_of(s)
    for what, n_new in (('end to end', s.new), ('prefill', 1)):
        sides = {name: lambda model=model, n_new=n_new: generate(model, prompts, n_new, temperature=0)
                 for name, model in models.items()}
        seconds = alternate(sides, s.rounds, warmup=1)
        n_tokens = s.batch * (n_new if what == 'end to end' else s.prompt)
        yield {'scale': scale, 'what': f'throughput, {what}',
               'standard tokens/s': round(n_tokens / seconds['standard'], 1),
               **{name: round(1 / ratio, 3) for name, ratio in over_standard(seconds).items()}}


def figures(s: Settings) -> Iterator[dict]:
    for scale in s.scales.split(','):
        yield from speed(scale, s)
        used = {name: memory(name, scale, s) if s.toy else apart(memory, name, scale, s) for name in method_names(s)}
        for what in ('held', 'peak', 'cache'):
            n_bytes = {name: of_method[what] for name, of_method in used.items()}
            n_bytes['standard'] = max(1, n_bytes['standard'])  # at toy size it may be nothing
            yield {'scale': scale, 'what': f'memory, {what}',
                   'standard MiB': round(n_bytes['standard'] / 2 ** 20, 1), **over_standard(n_bytes)}


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, *_ = load_settings(Settings, argv)
        if s.toy:
            s = replace(s, scales='toy', batch=2, prompt=8, new=4)
        write_results('inference', figures(s), toy=s.toy)


if __name__ == '__main__':
    main()
