"""Context-Ready: backpropagation through time by the fast form beside the loop, and generation by the paper's table
A13.

    python -m bench.context_ready [--toy]        --toy: seconds, at sizes that tell nothing; writes nothing

'bptt': a training step by the equations as they read (`loop`, which computes segments again in the backward) and by
the fast form in scans/, same weights and tokens, fp32: the pointer-chasing shape of appendix B (C 256, 4 heads,
window 38, batch 64, T 338) and smaller ones. peak_mb: what the step takes beside weights and gradients, each measured
in a process of its own.

'generation': one sequence, random weights at the table's shapes; eager, on a GPU also as a CUDA graph. Ratios are to
the Roformer that the paper compares with: of speed, and of the weights read per token, which decide on a machine that
is bound by memory.
"""
import functools

import torch

from bench import alternate, apart, options, resident, write_results
from common.decoding import generate, roomy_cache
from common.machine import decoding_dtype, start_processes
from model_context_ready import Config, Model, context_ready
from train import Settings

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
SHAPES = [  # of 'bptt': C, batch, T, window
    (256, 64, 338, 38),
    (128, 64, 338, 38),
    (64, 64, 114, 38),
]
TOY_SHAPES = [(16, 2, 13, 5)]
PAIRS = [  # table A13: (Context-Ready, the Roformer beside it)
    ({'n_layer': 1, 'n_embd': 2048}, {'n_layer': 6, 'n_embd': 1088, 'K': 1}),
    ({'n_layer': 5, 'n_embd': 1120}, {'n_layer': 12, 'n_embd': 768, 'K': 1}),
]
TOY_PAIRS = [({'n_layer': 1, 'n_embd': 32}, {'n_layer': 2, 'n_embd': 32, 'K': 1})]
PROMPT, NEW = [[7] * 16], 10_000 if GPU else 32  # new tokens: the table's, on a GPU


def bptt_step(shape):
    """Return a function of 'loop' or 'fast' that does forward and backward of a model of that shape."""
    C, batch_size, T, window = shape
    torch.manual_seed(0)
    config = Config(n_layer=1, n_head=4, n_embd=C, window=window, vocab_size=128, n_ids=100, bptt=True)
    model = Model(config).to(DEVICE).train()
    idx = torch.randint(0, 100, (batch_size, T), device=DEVICE)

    def step(form):
        z = model.loop(idx) if form == 'loop' else context_ready.stream(model, idx)
        model.zero_grad()
        model.nll(z, idx).backward()
    return step


def peak_mb(shape, form):
    """MiB that a step takes at its peak; to be called in a fresh process."""
    torch.set_num_threads(1)
    step = bptt_step(shape)
    before = resident()['held']
    step(form)
    return round((resident()['peak'] - before) / 2 ** 20)


def bptt(toy):
    if context_ready is None:  # there is no folder scans/
        return
    for shape in TOY_SHAPES if toy else SHAPES:
        step = bptt_step(shape)
        sides = {form: functools.partial(step, form) for form in ('loop', 'fast')}
        seconds = alternate(sides, rounds=1 if toy else 5, warmup=1)
        C, batch_size, T, window = shape
        row = {'what': 'bptt', 'C': C, 'batch': batch_size, 'T': T, 'window': window,
               'scan_ms': round(seconds['fast'] * 1e3),
               'loop_over_scan': round(seconds['loop'] / seconds['fast'], 2)}
        if not toy:
            row |= {'scan_peak_mb': apart(peak_mb, shape, 'fast'), 'loop_peak_mb': apart(peak_mb, shape, 'loop')}
        yield row


@torch.inference_mode()
def decode_eagerly(model, new):
    """Greedy tokens one by one, every operator launched by Python."""
    cache = roomy_cache(model, PROMPT, new)
    token = model.extend(torch.tensor(PROMPT, device=DEVICE), cache).argmax(-1, keepdim=True)
    for _ in range(new - 1):
        token = model.extend(token, cache).argmax(-1, keepdim=True)
    return token.item()


def generation(pairs, new):
    """Rows of table A13: decoding speed and weights read, relative to the Roformer of each pair."""
    dtype = decoding_dtype('auto', DEVICE)
    for pair in pairs:
        models = []
        for values in pair:
            torch.manual_seed(0)
            models.append(Model(Config(n_head=16, **values)).eval().to(DEVICE, dtype))
        # of the embedding a token reads one row
        read = [sum(p.numel() for p in model.parameters()) - model.embed.weight.numel() for model in models]
        modes = {'eager': lambda model: decode_eagerly(model, new)}
        if GPU:
            modes['CUDA graph'] = lambda model: generate(model, PROMPT, new, temperature=0)
        for mode, decode in modes.items():
            sides = {i: lambda model=model, decode=decode: decode(model) for i, model in enumerate(models)}
            seconds = alternate(sides, rounds=3, warmup=1)
            for i, (model, values) in enumerate(zip(models, pair)):
                n = sum(p.numel() for p in model.parameters())
                yield {'what': 'generation', 'mode': mode, 'dtype': str(dtype)[6:],
                       'D': values['n_layer'], 'C': values['n_embd'],
                       'correction': i == 0, 'million_parameters': round(n / 1e6),
                       'tokens_per_s': round(new / seconds[i], 1),
                       'speed_over_roformer': round(seconds[1] / seconds[i], 2),
                       'weights_read_over_roformer': round(read[i] / read[1], 2),
                       'cache_bytes_per_token': 2 * dtype.itemsize * values['n_layer'] * values['n_embd']}


def figures(toy):
    yield from bptt(toy)
    yield from generation(TOY_PAIRS, 2) if toy else generation(PAIRS, NEW)


def main(argv=None):
    toy = '--toy' in options(argv, '--toy')
    start_processes(Settings())
    write_results('context_ready', figures(toy), toy=toy)


if __name__ == '__main__':
    main()
