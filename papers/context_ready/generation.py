"""Generation speed of Context-Ready: a few wide layers compared with a Roformer (table A13).

    python -m papers.context_ready.generation [--toy]

One sequence, random weights at the table's shapes; eager, on a GPU also as a CUDA graph. The speed
is that after 16 tokens, in the paper over 10,000. `ms_at_T` is the time of a token after T others;
in the paper it grows by less than 4% from T = 100 to 10,000.
`papers.context_ready.unrolls` has the multiply-adds and the cache size of a token.
"""
from collections.abc import Iterator

import torch

from bench import DEVICE, GPU, decoding_speeds, measure
from lm_architectures.decode.generation import Decoder
from lm_architectures.machine.devices import decoding_dtype, start_processes
from lm_architectures.run.models import count_parameters
from model_context_ready import Config, Model
from train import Settings

PAIRS = [  # (Context-Ready, its Roformer)
    ({'n_layer': 1, 'n_embd': 2048}, {'n_layer': 6, 'n_embd': 1088, 'K': 1}),
    ({'n_layer': 5, 'n_embd': 1120}, {'n_layer': 12, 'n_embd': 768, 'K': 1}),
]
TOY_PAIRS = [({'n_layer': 1, 'n_embd': 32}, {'n_layer': 2, 'n_embd': 32, 'K': 1})]
NEW = 50 if GPU else 16  # tokens per timing
LENGTHS = 100, 1000, 10_000  # T


def decode_eagerly(decoder: Decoder) -> None:
    """Decode a token without a CUDA graph."""
    decoder.tokens = decoder.model.extend(decoder.tokens[:, None], decoder.cache).argmax(-1)


def figures(toy: bool) -> Iterator[dict]:
    """Yield decoding speed, absolute and relative to the Roformer of each pair."""
    pairs, new, dtype = TOY_PAIRS if toy else PAIRS, 2 if toy else NEW, decoding_dtype('auto', DEVICE.type)
    lengths, modes = LENGTHS[:1] if toy else LENGTHS, {'eager': decode_eagerly}
    if GPU:
        modes['CUDA graph'] = Decoder.next_tokens
    for pair in pairs:
        torch.manual_seed(0)
        models = {i: Model(Config(n_head=16, prefill_tol=1, **values)).eval().to(DEVICE, dtype)
                  for i, values in enumerate(pair)}  # prefill_tol: an approximate prefill is enough for timing
        for mode, step in modes.items():
            speeds, at = decoding_speeds(models, [16], new, 9, step), decoding_speeds(models, lengths, 4, step=step)
            for i, values in enumerate(pair):
                yield {'mode': mode, 'dtype': str(dtype)[6:], 'D': values['n_layer'], 'C': values['n_embd'],
                       'correction': i == 0, 'million_parameters': round(count_parameters(models[i]) / 1e6),
                       'tokens_per_s': round(speeds[i, 16], 1),
                       'speed_over_roformer': round(speeds[i, 16] / speeds[1, 16], 2),
                       **{f'ms_at_{T}': round(1000 / at[i, T], 2) for T in lengths}}


def main(argv: list[str] | None = None) -> None:
    start_processes(Settings())
    measure(argv, context_ready=figures)


if __name__ == '__main__':
    main()
