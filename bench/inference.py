"""Prefill and decoding of the SPS family by the paper's protocol (table 2): speed and memory as ratios to Standard's.

    python -m bench.inference [--toy]

On a GPU 16 sequences, prefill 1024, 3072 decode steps at S, every method as a CUDA graph; on CPU 4 sequences, 256 + 128
at XS. Speed: one process, the methods in turn. Memory: a process for each, its peak and what it holds at the end, over
what it held before there was a model. Both through decoding.generate.
"""
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import FAMILY, alternate, make_model, over_standard, resident, write_results
from common.decoding import generate, pack_weights, roomy_cache

GPU = torch.cuda.is_available()


@dataclass
class Sizes:
    batch: int
    prefill: int
    new: int
    shape: dict

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 50256, (self.batch, self.prefill), generator=generator).tolist()


FULL = Sizes(4, 256, 128, dict(n_layer=8, n_head=8, n_embd=512))
if GPU:
    FULL = Sizes(16, 1024, 3072, dict(n_layer=12, n_head=12, n_embd=768))
TOY = Sizes(2, 8, 4, dict(n_layer=1, n_head=2, n_embd=32))


def ready_model(name: str, sizes: Sizes):
    return pack_weights(make_model(name, **sizes.shape).eval().to(torch.bfloat16))


def memory(name: str, sizes: Sizes) -> dict[str, int]:
    """Bytes {'peak', 'held', 'cache'} of generating once with this method; to be called in a fresh process."""
    torch.zeros(1, device='cuda' if GPU else 'cpu')
    before = resident()['held']
    model, prompts = ready_model(name, sizes), sizes.prompts()
    cache = roomy_cache(model, prompts, sizes.new)
    if GPU:  # the peak starts again, at what is held
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    generate(model, prompts, sizes.new, temperature=0, cache=cache)
    return {what: n - before for what, n in resident().items()} | {'cache': cache.nbytes}


def memory_apart(name: str, _) -> dict[str, int]:
    """`memory` in a process of its own, at full size."""
    command = [sys.executable, '-m', 'bench.inference', name]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def speed(sizes: Sizes) -> Iterator[dict]:
    models, prompts = {name: ready_model(name, sizes) for name in FAMILY}, sizes.prompts()
    for what, n_new, rounds in (('end-to-end tokens/s', sizes.new, 3), ('prefill tokens/s', 1, 7)):
        sides = {name: lambda model=model, n_new=n_new: generate(model, prompts, n_new, temperature=0)
                 for name, model in models.items()}
        ratios = over_standard(alternate(sides, rounds, warmup=1))
        yield {'what': what} | {name: round(1 / ratio, 3) for name, ratio in ratios.items()}


def figures(sizes: Sizes, measure_memory) -> Iterator[dict]:
    yield from speed(sizes)
    used = {name: measure_memory(name, sizes) for name in FAMILY}
    for what in ('peak', 'held', 'cache'):
        of_standard = max(1, used['standard'][what])  # at toy size it may be nothing
        yield {'what': f'{what} memory'} | over_standard({**{name: u[what] for name, u in used.items()},
                                                          'standard': of_standard})


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in FAMILY:
        print(json.dumps(memory(argv[0], FULL)))
        return
    toy = '--toy' in argv
    write_results('inference', figures(TOY, memory) if toy else figures(FULL, memory_apart), toy=toy)


if __name__ == '__main__':
    main()
