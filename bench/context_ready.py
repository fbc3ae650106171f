"""Context-Ready's generation by the paper's table A13: few wide layers with a correction beside a Roformer.

    python -m bench.context_ready [--toy]

One sequence, random weights at the table's shapes; eager, on a GPU also as a CUDA graph. Ratios are to the Roformer
that the paper compares with: of speed, and of the weights read per token, which decide on a machine that is bound by
memory. `python -m bench.scans` measures training by backpropagation through time.
"""
from collections.abc import Iterator

import torch

from bench import alternate, measure
from common.decoding import allocate_cache, generate
from common.machine import decoding_dtype, start_processes
from common.runs import count_parameters
from model_context_ready import Config, Model
from train import Settings

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
PAIRS = [  # (Context-Ready, the Roformer beside it)
    ({'n_layer': 1, 'n_embd': 2048}, {'n_layer': 6, 'n_embd': 1088, 'K': 1}),
    ({'n_layer': 5, 'n_embd': 1120}, {'n_layer': 12, 'n_embd': 768, 'K': 1}),
]
TOY_PAIRS = [({'n_layer': 1, 'n_embd': 32}, {'n_layer': 2, 'n_embd': 32, 'K': 1})]
PROMPT, NEW = [[7] * 16], 10_000 if GPU else 32  # new tokens: the table's, on a GPU


@torch.inference_mode()
def decode_eagerly(model, new: int) -> int:
    """Greedy tokens one by one, every operator launched by Python."""
    cache = allocate_cache(model, PROMPT, new)
    token = model.extend(torch.tensor(PROMPT, device=DEVICE), cache).argmax(-1, keepdim=True)
    for _ in range(new - 1):
        token = model.extend(token, cache).argmax(-1, keepdim=True)
    return token.item()


def figures(toy: bool) -> Iterator[dict]:
    """Decoding speed and weights read, relative to the Roformer of each pair."""
    pairs, new, dtype = TOY_PAIRS if toy else PAIRS, 2 if toy else NEW, decoding_dtype('auto', DEVICE)
    for pair in pairs:
        models = []
        for values in pair:
            torch.manual_seed(0)
            models.append(Model(Config(n_head=16, **values)).eval().to(DEVICE, dtype))
        # of the embedding a token reads one row
        read = [count_parameters(model) - model.embed.weight.numel() for model in models]
        modes = {'eager': decode_eagerly}
        if GPU:
            modes['CUDA graph'] = lambda model, new: generate(model, PROMPT, new, temperature=0)
        for mode, decode in modes.items():
            sides = {i: lambda model=model, decode=decode: decode(model, new) for i, model in enumerate(models)}
            seconds = alternate(sides, rounds=3, warmup=1)
            for i, (model, values) in enumerate(zip(models, pair)):
                yield {'mode': mode, 'dtype': str(dtype)[6:], 'D': values['n_layer'], 'C': values['n_embd'],
                       'correction': i == 0, 'million_parameters': round(count_parameters(model) / 1e6),
                       'tokens_per_s': round(new / seconds[i], 1),
                       'speed_over_roformer': round(seconds[1] / seconds[i], 2),
                       'weights_read_over_roformer': round(read[i] / read[1], 2),
                       'cache_bytes_per_token': 2 * dtype.itemsize * values['n_layer'] * values['n_embd']}


def main(argv: list[str] | None = None) -> None:
    start_processes(Settings())
    measure(argv, context_ready=figures)


if __name__ == '__main__':
    main()
