"""Decoding tokens/s of model_standard compared with Hugging Face `generate` with its cache, same weights.

    python -m bench.generate [--toy]

8 layers, 512 wide, vocabulary 50304, prompts of 16 tokens, 32 new ones, greedy. 'float32': both in fp32. 'best': ours
in the dtype that sample.py uses (fp32 on a CPU, bf16 on a GPU), Hugging Face in the faster of fp32 and bf16. All take
turns in one process. A ratio is the median over the rounds, because the machine may slow down for a while. Then the
time of each two-stream method, which runs a pair of positions per token, over Standard's.
"""
import statistics
from collections.abc import Callable, Iterator

import torch

import model_standard
from bench import FAMILY, alternate, alternate_times, make_model, options, over_standard, write_results
from common.decoding import generate
from common.export import to_llama
from common.machine import decoding_dtype

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
SHAPE, TOY_SHAPE = dict(n_layer=8, n_head=8, n_embd=512), dict(n_layer=1, n_head=2, n_embd=32)
PROMPT, NEW = 16, 32  # tokens: few, so that many short rounds take turns
OUR_DTYPE = decoding_dtype('auto', DEVICE.type)


def make_sides(shape: dict, dtype, batch_size: int, n_new: int) -> dict[str, Callable]:
    """{side: function that generates}, after checking that our tokens are the other's likeliest, but for rounding."""
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(eos_id=None, n_ids=50304, **shape)).to(DEVICE).eval()
    llama = to_llama(model.config, model.state_dict(), 50304).to(DEVICE, dtype)
    model = model.to(dtype)
    prompts = torch.randint(0, 50257, (batch_size, PROMPT))
    on_device = prompts.to(DEVICE)

    def ours():
        return generate(model, prompts.tolist(), n_new, temperature=0)

    def hf():
        texts = llama.generate(on_device, attention_mask=torch.ones_like(on_device), do_sample=False,
                               max_new_tokens=n_new, min_new_tokens=n_new)
        return texts[:, PROMPT:].tolist()
    if dtype == torch.float32:
        # compare logits, because rounding may break a tie between two tokens
        new = torch.tensor(ours(), device=DEVICE)
        with torch.no_grad():
            logits = llama(input_ids=torch.cat([on_device, new], 1)[:, :-1]).logits[:, PROMPT - 1:]
        assert (logits.amax(-1) - logits.gather(-1, new.unsqueeze(-1)).squeeze(-1)).max() < 1e-4
    return {'ours': ours, 'hf': hf}


def beside_hugging_face(shape: dict, batch_size: int, n_new: int, rounds: int) -> Iterator[dict]:
    sides = {(side, str(dtype)[6:]): function for dtype in (torch.float32, torch.bfloat16)
             for side, function in make_sides(shape, dtype, batch_size, n_new).items()
             if side == 'hf' or dtype in (torch.float32, OUR_DTYPE)}
    times = alternate_times(sides, rounds, warmup=1)
    fastest = min(('float32', 'bfloat16'), key=lambda dtype: statistics.median(times['hf', dtype]))
    for terms, ours, hf in ('float32', 'float32', 'float32'), ('best', str(OUR_DTYPE)[6:], fastest):
        pair = times['ours', ours], times['hf', hf]
        our_speed, hf_speed = (batch_size * n_new / statistics.median(seconds) for seconds in pair)
        yield {'terms': terms, 'batch': batch_size, 'ours_tokens_per_s': round(our_speed),
               'hf_tokens_per_s': round(hf_speed), 'ours_dtype': ours, 'hf_dtype': hf,
               'ratio': round(statistics.median(b / a for a, b in zip(*pair)), 3)}


def methods(shape: dict, batch_size: int, n_new: int, rounds: int) -> Iterator[dict]:
    """The time of each method of the SPS family over Standard's."""
    prompts = torch.randint(0, 50256, (batch_size, PROMPT)).tolist()
    models = {name: make_model(name, **shape).eval().to(OUR_DTYPE) for name in FAMILY}
    sides = {name: lambda model=model: generate(model, prompts, n_new, temperature=0) for name, model in models.items()}
    ratios = over_standard(alternate(sides, rounds, warmup=1))
    yield {'terms': 'time over standard', 'batch': batch_size, 'dtype': str(OUR_DTYPE)[6:]} | ratios


def figures(shape: dict, batch_sizes: tuple, n_new: int, rounds: int) -> Iterator[dict]:
    for measure in beside_hugging_face, methods:
        for batch_size in batch_sizes:
            yield from measure(shape, batch_size, n_new, rounds)


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    shape, batch_sizes, n_new, rounds = (TOY_SHAPE, (2,), 4, 1) if toy else (SHAPE, (1, 16), NEW, 7)
    write_results('generate', figures(shape, batch_sizes, n_new, rounds), toy=toy)


if __name__ == '__main__':
    main()
