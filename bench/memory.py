"""The memory that --dry_run estimates beside the peak of a training step on CPU, a process each.

    python -m bench.memory [--toy]

'estimated_mib' is `common.memory.memory_by_rows`. 'measured_mib' is the peak of the process over what it held before
there was a model, with every large tensor mapped by itself (MALLOC_MMAP_THRESHOLD_), so that freed memory goes back:
what its tensors take. The allocator settings of train.py keep freed blocks, which takes up to half more on CPU.
Gradients exist at the start, as from the second micro-batch of a step on; float32.
"""

import torch

import train
from bench import apart, options, resident, write_results
from common import runs
from common.memory import memory_by_rows

SHAPE, TOY_SHAPE = dict(n_layer=4, n_head=4, n_embd=256), dict(n_layer=1, n_head=2, n_embd=32)
VOCABULARY = dict(vocab_size=4160, n_ids=4096, eos_id=None)
GPN = dict(d_emb=256, d_k=32, d_v=64)
CASES = [  # (model, what differs, T, rows)
    ('standard', {}, 256, 24), ('standard', {}, 512, 12), ('standard', {'checkpoint_blocks': True}, 512, 24),
    ('standard', {'window': 64}, 512, 12),
    ('sps', {}, 256, 12), ('sps', {}, 512, 6), ('sps', {'checkpoint_blocks': True}, 512, 12),
    ('sps', {'method': 'two_x_memory', 'window': None}, 256, 12), ('sps', {'method': 'delayed_state'}, 256, 12),
    ('sps', {'method': 'reverse_sps'}, 512, 6),
    ('context_ready', {'K': 1}, 256, 24), ('context_ready', {'K': 3}, 256, 8), ('context_ready', {'K': 3}, 512, 4),
    ('context_ready', {'K': 5, 'checkpoint_unrolls': True}, 256, 16),
    ('nextlat', {'objective': 'nextlat', 'horizon': 1}, 512, 8),
    ('nextlat', {'objective': 'nextlat', 'horizon': 4}, 256, 12),
    ('nextlat', {'objective': 'mtp', 'horizon': 2}, 256, 12),
    ('gpn', {'n_layer': 1, **GPN}, 256, 24), ('gpn', {'n_layer': 2, **GPN}, 512, 12)]


def config(name, differs, toy):
    return runs.make_config(name, {**VOCABULARY, **(TOY_SHAPE if toy else SHAPE), **differs})


def optimizer_of(model):
    return train.make_optimizer(model, train.Settings())


def estimated(name, differs, T, rows, toy=False) -> int:
    c = config(name, differs, toy)
    fixed, by_row = memory_by_rows(lambda: runs.blank_model(name, c), optimizer_of, torch.float32, T, on_gpu=False)
    return fixed + by_row * rows


def measured(name, differs, T, rows, toy=False) -> int:
    """Bytes at the peak of two steps over those before; to be called in a fresh process."""
    steps(name, config(name, differs, True), T, 2)  # code and tables that any model needs
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the peak starts again
    before = resident()['held']
    steps(name, config(name, differs, toy), T, rows)
    return resident()['peak'] - before


def steps(name, c, T, rows):
    torch.manual_seed(0)
    model = runs.model_file(name).Model(c)
    if hasattr(model, 'choose_scan'):
        model.scan_report = {'scan': 'fast', 'device': 'cpu', 'unused': []}
    optimizer = optimizer_of(model)
    idx = torch.randint(0, 4096, (rows, T))
    for _ in range(2):
        model(idx, idx)['loss'].backward()
        optimizer.step()  # gradients stay, as between micro-batches


def rows(toy: bool):
    for name, differs, T, n_rows in CASES[:1] if toy else CASES:
        case = name, differs, 32 if toy else T, 2 if toy else n_rows
        peak = apart(measured, *case, toy, MALLOC_MMAP_THRESHOLD_='65536')
        needed = estimated(*case, toy)
        yield {'model': name, **differs, 'T': case[2], 'rows': case[3], 'estimated_mib': round(needed / 2 ** 20),
               'measured_mib': round(peak / 2 ** 20), 'estimated_over_measured': round(needed / peak, 3)}


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    write_results('memory', rows(toy), toy=toy)


if __name__ == '__main__':
    main()
