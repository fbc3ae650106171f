"""Decoding speed of model_standard, compared with Hugging Face `generate` with the same weights.

    python -m bench.generate [--toy]

8 layers of width 512, vocabulary 50304, prompts of 16 tokens, greedy; 32 new tokens on a CPU, 512
on a GPU. 'float32' and, on a GPU, 'bfloat16': both sides in that dtype. 'best', on a CPU: ours in
fp32, Hugging Face in the faster of the two. `python -m bench.inference` measures the two-stream
methods.
"""
from collections.abc import Iterator
from functools import partial

import torch

from bench import DEVICE, GPU, TOY_SHAPE, Settings, alternate, beside_hugging_face, make_model, measure
from common.decoding import generate
from common.families import to_family

DTYPES = 'float32', 'bfloat16'


def figures(s: Settings) -> Iterator[dict]:
    shape = dict(n_layer=8, n_head=8, n_embd=512)
    n_new = 512 if GPU else 32  # many, to outweigh capturing the graph
    if s.toy:
        shape, n_new = TOY_SHAPE, 4
    for batch_size in (2,) if s.toy else (1, 16):
        prompts, sides = torch.randint(0, 50257, (batch_size, 16), device=DEVICE), {}
        for dtype in DTYPES:
            model = make_model('standard', eos_id=None, n_ids=50304, **shape).eval()
            llama = to_family(model.config, model.state_dict(), 50304).to(DEVICE, getattr(torch, dtype))
            sides['hf', dtype] = partial(llama.generate, prompts, attention_mask=torch.ones_like(prompts),
                                         do_sample=False, max_new_tokens=n_new, min_new_tokens=n_new)
            if GPU or dtype == 'float32':
                model = model.to(getattr(torch, dtype))
                sides['ours', dtype] = partial(generate, model, prompts.tolist(), n_new, temperature=0)
        seconds = alternate(sides, 1 if s.toy else 7, warmup=1)
        fastest = min(DTYPES, key=lambda dtype: seconds['hf', dtype])
        for terms, ours, hf in (('float32', 'float32', 'float32'),
                                ('bfloat16', 'bfloat16', 'bfloat16') if GPU else ('best', 'float32', fastest)):
            yield {'batch': batch_size} | beside_hugging_face(seconds, batch_size * n_new, terms, ours, hf)


def main(argv: list[str] | None = None) -> None:
    measure(argv, generate=figures)


if __name__ == '__main__':
    main()
