"""How long PyTorch's threads should wait awake (`quiet_start` of common/start.py), on all cores of a CPU.

    python -m bench.spin [--toy]

Decoding of one text by 8 layers of 512, 8-bit and bf16 weights, and training steps in fp32 of 4 layers of 128, for
values of GOMP_SPINCOUNT: on a machine that is otherwise idle, and beside a program that keeps one core busy. A process
for each value, as it is read when PyTorch is loaded; the values take turns. Speeds are over those of the first value.
"""
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from bench import alternate, apart, make_model, options, write_results
from common.decoding import generate
from common.int8 import prepare_weights

SPINS = 1000, 5000, 15000, 30000, 300000  # the last is OpenMP's own default
ROUNDS = 2  # processes of each value
BUSY = 'while True: pass'


def speeds(toy: bool) -> dict[str, float]:
    """{what: tokens/s}, in this process."""
    shape, new, rounds = (dict(n_layer=1, n_head=2, n_embd=32), 2, 1) if toy else (dict(n_layer=8, n_head=8), 16, 3)
    sides = {}
    for name, dtype, weights in ('int8', torch.float32, 'int8'), ('bfloat16', torch.bfloat16, None):
        model = make_model('standard', **{'n_embd': 512, **shape}, n_ids=50304, vocab_size=50304)
        model = prepare_weights(model.eval().to(dtype), weights)
        sides[f'decoding_{name}'] = partial(generate, model, [[1] * 16], new, temperature=0)
    trained = make_model('standard', n_layer=1 if toy else 4, n_head=4, n_embd=128, n_ids=320, vocab_size=320,
                         eos_id=None)
    idx = torch.randint(320, (1, 16) if toy else (4, 256))

    def step():
        trained.zero_grad()
        trained(idx, idx)['loss'].backward()
    sides['training'] = step
    n_tokens = {name: idx.numel() if name == 'training' else new for name in sides}
    return {name: n_tokens[name] / seconds for name, seconds in alternate(sides, rounds, warmup=1).items()}


def figures(toy: bool) -> Iterator[dict]:
    for beside in None, 'a busy program':
        busy = beside and subprocess.Popen([sys.executable, '-c', BUSY])
        try:
            found = {spins: [] for spins in SPINS[:2 if toy else None]}
            for _ in range(1 if toy else ROUNDS):
                for spins in found:
                    found[spins].append(apart(speeds, toy, GOMP_SPINCOUNT=str(spins)))
        finally:
            if busy:
                busy.kill()
                busy.wait()
        median = {spins: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                  for spins, runs in found.items()}
        for spins, of_name in median.items():
            yield {'spin_count': spins, 'beside': beside,
                   **{f'{name}_tokens_per_s': round(value) for name, value in of_name.items()},
                   **{f'{name}_ratio': round(value / median[SPINS[0]][name], 2) for name, value in of_name.items()}}


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    write_results('spin', figures(toy), toy=toy)


if __name__ == '__main__':
    main()
