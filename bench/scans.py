"""Training steps of GPN, Gated DeltaNet and Context-Ready (bptt): fast forms compared with loops.

    python -m bench.scans [--toy]

A step is a forward and backward pass: on a CPU in fp32, of GPN also under bf16 autocast if it has
bf16 units; on a GPU under bf16 autocast at the papers' sizes. Peak memory is of one process per
form.
"""
from collections.abc import Callable, Iterator

import torch

import train
from bench import DEVICE, GPU, alternate, isolated, measure, resident
from lm_architectures.machine import devices
from lm_architectures.run import models
from scans import gpn

BYTES = dict(vocab_size=320, n_ids=257, eos_id=None)
SMALL = BYTES | dict(n_layer=1, n_embd=256, n_head=4, d_k=32, d_v=64)
CHASE = dict(n_layer=1, n_head=4, window=38, vocab_size=128, n_ids=100, bptt=True)  # Context-Ready, appendix B
CASES = [  # model, batch, T, Config values
    ('gpn', 8, 256, SMALL | dict(d_emb=128, n_ffn=683)),
    ('gpn', 8, 256, SMALL | dict(d_emb=128, n_ffn=683, n_layer=2)),
    ('gdn', 8, 256, SMALL | dict(n_ffn=683, n_layer=2)),
    *(('context_ready', 64, T, CHASE | dict(n_embd=C)) for C, T in ((256, 338), (128, 338), (64, 114)))]
GPU_CASES = [('gpn', 4, 256, {}), ('gdn', 4, 256, {}), ('gpn', 128, 2048, {}), ('gdn', 32, 2048, {}), CASES[-3]]
TOY = BYTES | dict(n_layer=1, n_embd=32, n_head=2, d_k=8, d_v=12, n_ffn=40)
TOY_CASES = [('gpn', 2, 16, TOY | dict(d_emb=16)), ('gdn', 2, 16, TOY),
             ('context_ready', 2, 13, CHASE | dict(n_embd=16, window=5))]


def make_step(name: str, form: str, batch_size: int, T: int, values: dict) -> Callable[[], float]:
    """Return a function that does a step and returns the loss. form: loop, fast or fast bf16."""
    torch.manual_seed(0)
    file = models.model_file(name)
    model = file.Model(file.Config(scan=form.split()[0], **values)).to(DEVICE)
    for p in model.parameters():  # all: zero matrices would make other gradients zero
        if p.dim() == 2:  # so small that rounding errors do not grow from token to token
            torch.nn.init.normal_(p, std=0.5 * p.shape[1] ** -0.5)
    tokens = torch.randint(0, model.config.n_ids, (2, batch_size, T), device=DEVICE)

    def step():
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU or form == 'fast bf16'):
            loss = model(*tokens)['loss']
        loss.backward()
        return loss.item()
    return step


def peak_mb(*case) -> float:
    """Return the peak memory of two steps in MB. Call it in a new process."""
    devices.start_processes(train.Settings())
    step = make_step(*case)
    before = resident()['held']
    for _ in range(2):
        step()
    return round((resident()['peak'] - before) / 1e6, 1)


def compare(name: str, batch_size: int, T: int, values: dict, toy: bool) -> dict:
    """Return a row with the time and peak memory of each form, and the speed-up over the loop."""
    forms = ['fast'] if T > 1000 else ['fast', 'loop']  # a loop over 2048 tokens takes minutes
    if not GPU and name == 'gpn' and gpn.c_dtype(torch.bfloat16) == torch.bfloat16:
        forms.append('fast bf16')
    steps = {form: make_step(name, form, batch_size, T, values) for form in forms}
    losses = {form: step() for form, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 0.02, losses
    seconds = alternate(steps, rounds=1 if toy else 5, warmup=0 if toy else 1)
    row = {'model': name, 'n_layer': values.get('n_layer'), 'C': values.get('n_embd'), 'batch': batch_size, 'T': T,
           'tokens_per_s': round(batch_size * T / seconds['fast'])}
    row |= {f'{form}_ms': round(1e3 * s, 1) for form, s in seconds.items()}
    row |= {f'loop_over_{form}': round(seconds['loop'] / s, 2) for form, s in seconds.items()
            if form != 'loop' and 'loop' in seconds}
    del steps
    if not toy:
        row |= {f'{form}_peak_mb': isolated(peak_mb, name, form, batch_size, T, values) for form in forms}
    return row


def figures(toy: bool) -> Iterator[dict]:
    devices.start_processes(train.Settings())
    for case in TOY_CASES if toy else GPU_CASES if GPU else CASES:
        yield compare(*case, toy)


def main(argv: list[str] | None = None) -> None:
    measure(argv, scans=figures)


if __name__ == '__main__':
    main()
