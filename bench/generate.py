"""Decoding speed of model_standard, compared with Hugging Face `generate` with the same weights.

    python -m bench.generate [--toy]

8 layers of width 512, vocabulary 50304, prompts of 16 tokens, greedy; 32 new tokens on a CPU, 512
on a GPU. 'float32' and, on a GPU, 'bfloat16': both sides in that dtype. 'best', on a CPU: ours in
fp32, Hugging Face in the faster of the two. `python -m bench.inference` measures the two-stream
methods.
"""
from collections.abc import Callable, Iterator

import torch

import model_standard
from bench import DEVICE, GPU, TOY_SHAPE, alternate, measure
from common.decoding import generate
from common.families import to_family

SHAPE = dict(n_layer=8, n_head=8, n_embd=512)
PROMPT, NEW = 16, 512 if GPU else 32  # tokens; on a GPU many, to outweigh capturing the graph
ROUNDS = 3 if GPU else 7


def make_sides(shape: dict, dtype, batch_size: int, n_new: int) -> dict[str, Callable]:
    """Return {side: function that generates}, with the same weights and prompts on both sides."""
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(eos_id=None, n_ids=50304, **shape)).to(DEVICE).eval()
    llama = to_family(model.config, model.state_dict(), 50304).to(DEVICE, dtype)
    model = model.to(dtype)
    prompts = torch.randint(0, 50257, (batch_size, PROMPT))
    on_device = prompts.to(DEVICE)

    def ours():
        return generate(model, prompts.tolist(), n_new, temperature=0)

    def hf():
        texts = llama.generate(on_device, attention_mask=torch.ones_like(on_device), do_sample=False,
                               max_new_tokens=n_new, min_new_tokens=n_new)
        return texts[:, PROMPT:].tolist()
    return {'ours': ours, 'hf': hf}


def figures(toy: bool) -> Iterator[dict]:
    shape, batch_sizes, n_new, rounds = (TOY_SHAPE, (2,), 4, 1) if toy else (SHAPE, (1, 16), NEW, ROUNDS)
    for batch_size in batch_sizes:
        sides = {(side, str(dtype)[6:]): function for dtype in (torch.float32, torch.bfloat16)
                 for side, function in make_sides(shape, dtype, batch_size, n_new).items()
                 if side == 'hf' or GPU or dtype == torch.float32}
        seconds = alternate(sides, rounds, warmup=1)
        fastest = min(('float32', 'bfloat16'), key=lambda dtype: seconds['hf', dtype])
        second = ('bfloat16', 'bfloat16', 'bfloat16') if GPU else ('best', 'float32', fastest)
        for terms, ours, hf in ('float32', 'float32', 'float32'), second:
            our_time, hf_time = seconds['ours', ours], seconds['hf', hf]
            yield {'terms': terms, 'batch': batch_size, 'ours_tokens_per_s': round(batch_size * n_new / our_time),
                   'hf_tokens_per_s': round(batch_size * n_new / hf_time), 'ours_dtype': ours, 'hf_dtype': hf,
                   'ratio': round(hf_time / our_time, 3)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, generate=figures)


if __name__ == '__main__':
    main()
