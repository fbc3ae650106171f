"""Training steps of GPN, Gated DeltaNet and Context-Ready (bptt): fast forms compared with loops.

    python -m bench.scans [--toy]

A step is train.py's, not compiled: on a CPU in fp32 and, if it has bf16 units, also under bf16
autocast; on a GPU under bf16 autocast at the papers' sizes. Peak memory is of one process per form.
"""
from collections.abc import Iterator

import torch

from bench import GPU, Settings, added_memory, alternate, in_new_process, measure
from bench.train_step import training_step
from scans import gpn

CHASE = dict(model='context_ready', n_layer=1, n_head=4, window=38, assumed_ids=100, bptt=True)  # appendix B
SMALL = dict(micro_batch_size=8, block_size=256, assumed_ids=257, n_embd=256, n_head=4, d_k=32, d_v=64, n_ffn=683)
TOY = dict(micro_batch_size=2, block_size=16, assumed_ids=257, n_embd=32, n_head=2, d_k=8, d_v=12, n_ffn=40)
CASES = [
    SMALL | dict(model='gpn', n_layer=1, d_emb=128),
    SMALL | dict(model='gpn', n_layer=2, d_emb=128),
    SMALL | dict(model='gdn', n_layer=2),
    *(CHASE | dict(micro_batch_size=64, block_size=T, n_embd=C) for C, T in ((256, 338), (128, 338), (64, 114)))]
GPU_CASES = [
    *(dict(model=model, micro_batch_size=4, block_size=256) for model in ('gpn', 'gdn')),
    dict(model='gpn', micro_batch_size=128, block_size=2048),
    dict(model='gdn', micro_batch_size=32, block_size=2048), CASES[-3]]
TOY_CASES = [
    TOY | dict(model='gpn', n_layer=1, d_emb=16), TOY | dict(model='gdn', n_layer=1),
    CHASE | dict(micro_batch_size=2, block_size=13, n_embd=16, window=5)]


def peak_mb(values: dict) -> float:
    """Return the peak memory of two steps in MB, beyond the model's. Call it in a new process."""
    step, *_ = training_step(**values)
    with added_memory() as added:
        step()
        step()
    return round(added['peak'] / 1e6, 1)


def compare(values: dict, toy: bool) -> dict:
    """Return a row with the time and peak memory of each form, and the speed-up over the loop."""
    name, batch_size, T = values['model'], values['micro_batch_size'], values['block_size']
    dtypes = {'fast': 'bfloat16' if GPU else 'float32'}
    if T < 1000:  # a loop over 2048 tokens takes minutes
        dtypes['loop'] = dtypes['fast']
    if not GPU and name == 'gpn' and gpn.c_dtype(torch.bfloat16) == torch.bfloat16:
        dtypes['fast bf16'] = 'bfloat16'
    forms = {form: values | dict(scan=form.split()[0], dtype=dtype, mask_documents=False, compile=False)
             for form, dtype in dtypes.items()}
    steps = {form: training_step(**own) for form, own in forms.items()}
    seconds = alternate({form: step for form, (step, *_) in steps.items()}, rounds=1 if toy else 5, warmup=1)
    config = steps['fast'][1].config
    row = {'model': name, 'n_layer': config.n_layer, 'C': config.n_embd, 'batch': batch_size, 'T': T,
           'tokens_per_s': round(batch_size * T / seconds['fast'])}
    row |= {f'{form}_ms': round(1e3 * s, 1) for form, s in seconds.items()}
    row |= {f'loop_over_{form}': round(seconds['loop'] / s, 2) for form, s in seconds.items()
            if form != 'loop' and 'loop' in seconds}
    del steps
    if not toy:
        row |= {f'{form}_peak_mb': in_new_process(peak_mb, own) for form, own in forms.items()}
    return row


def figures(s: Settings) -> Iterator[dict]:
    for case in TOY_CASES if s.toy else GPU_CASES if GPU else CASES:
        yield compare(case, s.toy)


def main(argv: list[str] | None = None) -> None:
    measure(argv, scans=figures)


if __name__ == '__main__':
    main()
