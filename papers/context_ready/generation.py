"""Generation speed of Context-Ready: a few wide layers compared with a Roformer (table A13).

    python -m papers.context_ready.generation

One sequence, random weights at the table's shapes; eager, on a GPU also as a CUDA graph. The speed
is that after 16 tokens, in the paper over 10,000. `ms_at_T` is the time of a token after T others;
in the paper it grows by less than 4% from T = 100 to 10,000.
`papers.context_ready.unrolls` has the multiply-adds and the cache size of a token.
"""
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.reporting import Settings, report
from bench.timing import DEVICE, GPU, alternate
from lm_architectures import train
from lm_architectures.decode.generation import Decoder, allocate_cache
from lm_architectures.machine.devices import pick_dtype, start_processes
from lm_architectures.run.models import count_parameters
from model_context_ready import Config, Model

PAIRS = [  # (Context-Ready, its Roformer)
    ({'n_layer': 1, 'n_embd': 2048}, {'n_layer': 6, 'n_embd': 1088, 'K': 1}),
    ({'n_layer': 5, 'n_embd': 1120}, {'n_layer': 12, 'n_embd': 768, 'K': 1}),
]
NEW = 50 if GPU else 16  # tokens per timing
LENGTHS = 100, 1000, 10_000  # T


def decode_eagerly(decoder: Decoder) -> None:
    """Decode a token without a CUDA graph."""
    decoder.tokens = decoder.model.extend(decoder.tokens[:, None], decoder.cache).argmax(-1)


@torch.inference_mode()
def seconds_per_token(models: dict, contexts, n_tokens: int, rounds: int, step: Callable) -> dict:
    """Return {(model's key, context): seconds}. step(decoder) decodes one token."""
    sides = {}
    for i, context in itertools.product(models, contexts):
        model, generator = models[i], torch.Generator().manual_seed(0)
        prompt = torch.randint(model.config.n_ids, (1, context), generator=generator).to(DEVICE)
        cache = allocate_cache(model, prompt.tolist(), (rounds + 1) * n_tokens)
        for part in prompt[:, :-1].split(1024, 1):
            model.extend(part, cache)
        sides[i, context] = partial(step, Decoder(model, prompt[:, -1:].tolist(), cache, 0, {'temperature': 0}))
    return alternate(sides, rounds, warmup=1, calls=n_tokens)


def speeds(s: Settings) -> Iterator[dict]:
    """Yield decoding speed, absolute and relative to the Roformer of each pair."""
    start_processes(train.Settings())
    dtype = pick_dtype('auto', DEVICE.type)
    modes = {'eager': decode_eagerly} | ({'CUDA graph': Decoder.next_tokens} if GPU else {})
    for pair in PAIRS:
        torch.manual_seed(0)
        models = {i: Model(Config(n_head=16, prefill_tol=1, **values)).eval().to(DEVICE, dtype)
                  for i, values in enumerate(pair)}  # prefill_tol: an approximate prefill is enough for timing
        for mode, step in modes.items():
            after_16 = seconds_per_token(models, [16], NEW, 9, step)
            at = seconds_per_token(models, LENGTHS, 4, 5, step)
            for i, values in enumerate(pair):
                yield {'mode': mode, 'dtype': str(dtype)[6:], 'D': values['n_layer'], 'C': values['n_embd'],
                       'correction': i == 0, 'million_parameters': round(count_parameters(models[i]) / 1e6),
                       'tokens_per_s': round(1 / after_16[i, 16], 1),
                       'speed_over_roformer': round(after_16[1, 16] / after_16[i, 16], 2),
                       **{f'ms_at_{T}': round(1000 * at[i, T], 2) for T in LENGTHS}}


def main(argv: list[str] | None = None) -> None:
    report(argv, Settings, speeds)


if __name__ == '__main__':
    main()
