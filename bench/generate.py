"""Decoding speed of model_standard, compared with Hugging Face `generate` with the same weights.

    python -m bench.generate [--toy]

8 layers of width 512, vocabulary 50304, prompts of 16 tokens, greedy; 32 new tokens on a CPU, 512
on a GPU. Both sides have the same dtype. `python -m papers.sps.inference` measures the two-stream
methods.
"""
from collections.abc import Callable, Iterator

import torch

import model_standard
from bench import DEVICE, GPU, TOY_SHAPE, alternate, measure
from lm_architectures.decode.generation import generate
from lm_architectures.hf.families import to_family

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
        for dtype in (torch.float32, torch.bfloat16):
            seconds = alternate(make_sides(shape, dtype, batch_size, n_new), rounds, warmup=1)
            yield {'terms': str(dtype)[6:], 'batch': batch_size,
                   'ours_tokens_per_s': round(batch_size * n_new / seconds['ours']),
                   'hf_tokens_per_s': round(batch_size * n_new / seconds['hf']),
                   'ratio': round(seconds['hf'] / seconds['ours'], 3)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, generate=figures)


if __name__ == '__main__':
    main()
