"""Prefill and decoding of the SPS family by the paper's protocol (table 2): throughput and memory as ratios to Standard's.

On a GPU 16 sequences, prefill 1024, 3072 decode steps at S, every method as a CUDA graph; on CPU 4 sequences, 256 + 128 at XS.
Speed: one process, the methods in turn. Memory: a process for each, its peak and what it holds at the end, over what it held
before there was a model. Both through decoding.generate.
"""
import json
import subprocess
import sys
from pathlib import Path

import torch

from bench import FAMILY, alternate, make_model, over_standard, resident, write_results
from common.decoding import generate, pack_weights, roomy_cache

GPU = torch.cuda.is_available()
BATCH, PREFILL, NEW = (16, 1024, 3072) if GPU else (4, 256, 128)
SHAPE = dict(n_layer=12, n_head=12, n_embd=768) if GPU else dict(n_layer=8, n_head=8, n_embd=512)
PROMPTS = torch.randint(0, 50256, (BATCH, PREFILL), generator=torch.Generator().manual_seed(0)).tolist()


def ready_model(name):
    return pack_weights(make_model(name, **SHAPE).eval().to(torch.bfloat16))


def memory(name):
    """Bytes {'peak', 'held', 'cache'} of generating once with this method; to be called in a fresh process."""
    torch.zeros(1, device='cuda' if GPU else 'cpu')
    before = resident()['held']
    model = ready_model(name)
    cache = roomy_cache(model, PROMPTS, NEW)
    if GPU:  # the peak starts again, at what is held
        torch.cuda.reset_peak_memory_stats()
    else:
        Path('/proc/self/clear_refs').write_text('5')
    generate(model, PROMPTS, NEW, temperature=0, cache=cache)
    return {k: v - before for k, v in resident().items()} | {'cache': cache.nbytes}


def main():
    models = {name: ready_model(name) for name in FAMILY}
    tokens = lambda n: {name: lambda model=model: generate(model, PROMPTS, n, temperature=0) for name, model in models.items()}
    whole, prefill = alternate(tokens(NEW), rounds=3, warmup=1), alternate(tokens(1), rounds=7, warmup=1)
    rows = [{'what': what} | {name: round(1 / ratio, 3) for name, ratio in over_standard(seconds).items()}
            for what, seconds in (('end-to-end tokens/s', whole), ('prefill tokens/s', prefill))]
    del models
    used = {}
    for name in FAMILY:
        out = subprocess.run([sys.executable, '-m', 'bench.inference', name], stdout=subprocess.PIPE, text=True, check=True).stdout
        used[name] = json.loads(out.splitlines()[-1])
    rows += [{'what': f'{what} memory'} | over_standard({name: u[what] for name, u in used.items()}) for what in ('peak', 'held', 'cache')]
    write_results('inference', rows)


if __name__ == '__main__':
    print(json.dumps(memory(sys.argv[1]))) if sys.argv[1:] else main()
