"""Training steps of GPN and Gated DeltaNet: the fast form in scans/ compared with the loop over the equations.

    python -m bench.scans [--toy]

A step is a forward and backward pass. On a CPU it runs in fp32 and, where the CPU has bf16 units, also under autocast;
on a GPU under autocast. Peak memory is measured in a process per form. On a GPU the models have the GPN paper's sizes,
and GPN's rows also have the share of the time that its bytes take at least: all weights once per token, and the memory
M twice in the forward and four times in the backward pass, which writes it in a replay, reads it, and reads and writes
its gradient.
"""
from collections.abc import Callable, Iterator

import torch

import train
from bench import alternate, apart, options, resident, write_results
from common import machine, runs
from scans import gpn

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
BANDWIDTH = {'H100': 3.35e12, 'H200': 4.8e12}  # bytes/s, the vendor's data sheets
BYTES = dict(vocab_size=320, n_ids=257, eos_id=None)
SMALL = BYTES | dict(n_layer=1, n_embd=256, n_head=4, d_k=32, d_v=64)
CASES = [  # model, batch, T, values of its Config
    ('gpn', 8, 256, SMALL | dict(d_emb=128, n_ffn=683)),
    ('gpn', 8, 256, SMALL | dict(d_emb=128, n_ffn=683, n_layer=2)),
    ('gdn', 8, 256, SMALL | dict(n_ffn=683, n_layer=2))]
GPU_CASES = [('gpn', 4, 256, {}), ('gdn', 4, 256, {}), ('gpn', 128, 2048, {}), ('gdn', 32, 2048, {})]
TOY = BYTES | dict(n_layer=1, n_embd=32, n_head=2, d_k=8, d_v=12, n_ffn=40)
TOY_CASES = [('gpn', 2, 16, TOY | dict(d_emb=16)), ('gdn', 2, 16, TOY)]


def make_step(name: str, form: str, batch_size: int, T: int, values: dict) -> Callable[[], float]:
    """Return a function that does forward and backward of a model and returns its loss.

    form: 'loop', 'fast' or 'fast bf16'.
    """
    torch.manual_seed(0)
    file = runs.model_file(name)
    model = file.Model(file.Config(scan=form.split()[0], **values)).to(DEVICE)
    for p in model.parameters():  # no matrix of zeros, whose gradients would be zero
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.03)
    tokens = torch.randint(0, model.config.n_ids, (2, batch_size, T), device=DEVICE)

    def step():
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU or form == 'fast bf16'):
            loss = model(*tokens)['loss']
        loss.backward()
        return loss.item()
    return step


def peak_mb(*case) -> float:
    """MB that two steps take at their peak; to be called in a fresh process."""
    machine.start_processes(train.Settings())
    step = make_step(*case)
    before = resident()['held']
    for _ in range(2):
        step()
    return round((resident()['peak'] - before) / 1e6, 1)


def least_seconds(batch_size: int, T: int, bandwidth: float) -> float:
    """Lower bound from memory traffic on the seconds of a step of the paper's GPN: weights in bf16, M in fp32."""
    sizes = gpn.Sizes.of(runs.model_file('gpn').Config())
    C, F, H, K, D, L, *_ = sizes
    columns = [sum(sizes.columns(i)) for i in range(L)]
    weights = 2 * (C * C + sum(C * width + (F + H * D) * C for width in columns))
    memory = 4 * batch_size * H * K * D
    return T * (2 * weights + 6 * memory) / bandwidth


def compare(name: str, batch_size: int, T: int, values: dict, toy: bool) -> dict:
    """One row: milliseconds and peak memory of each form, and the loop's time over the fast form's."""
    forms = ['fast'] if T > 256 else ['fast', 'loop']  # a loop over 2048 tokens takes minutes
    if not GPU and name == 'gpn' and gpn.c_dtype(torch.bfloat16) == torch.bfloat16:
        forms.append('fast bf16')
    steps = {form: make_step(name, form, batch_size, T, values) for form in forms}
    losses = {form: step() for form, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 0.02, losses
    seconds = alternate(steps, rounds=1 if toy else 5, warmup=0 if toy else 1)
    row = {'model': name, 'n_layer': values.get('n_layer'), 'batch': batch_size, 'T': T,
           'tokens_per_s': round(batch_size * T / seconds['fast'])}
    row |= {f'{form}_ms': round(1e3 * s, 1) for form, s in seconds.items()}
    row |= {f'loop_over_{form}': round(seconds['loop'] / s, 2) for form, s in seconds.items()
            if form != 'loop' and 'loop' in seconds}
    bandwidth = next((x for gpu, x in BANDWIDTH.items() if GPU and gpu in torch.cuda.get_device_name()), None)
    if bandwidth and name == 'gpn' and not toy:
        row['of_bandwidth_bound'] = round(least_seconds(batch_size, T, bandwidth) / seconds['fast'], 3)
    del steps
    if not toy:
        row |= {f'{form}_peak_mb': apart(peak_mb, name, form, batch_size, T, values) for form in forms}
    return row


def figures(toy: bool) -> Iterator[dict]:
    machine.start_processes(train.Settings())
    for case in TOY_CASES if toy else GPU_CASES if GPU else CASES:
        yield compare(*case, toy)


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    write_results('scans', figures(toy), toy=toy)


if __name__ == '__main__':
    main()
