"""The memory that --dry_run estimates compared with the peak of a training step on a CPU, a process each.

    python -m bench.memory [--toy]

'estimated_mib': 16 bytes per parameter and `common.memory.bytes_by_rows`, in fp32. 'measured_mib': the peak of the
process relative to what it held before it made the model, with every large tensor mapped by itself
(MALLOC_MMAP_THRESHOLD_), so that freed memory is returned. The allocator settings of train.py keep freed blocks, which
takes up to half more. The estimate is for a GPU's fused attention; up to T = 2048, the tiles of a CPU also keep their
probabilities. Gradients exist at the start, as from the second micro-batch of a step on.
"""

import torch

import train
from bench import apart, options, resident, write_results
from common import runs
from common.memory import bytes_by_rows

SHAPE, TOY_SHAPE = dict(n_layer=4, n_head=4, n_embd=256), dict(n_layer=1, n_head=2, n_embd=32)
VOCABULARY = dict(vocab_size=4160, n_ids=4096, eos_id=None)
CASES = [  # (model, settings, T, rows)
    ('standard', {}, 256, 24), ('standard', {}, 512, 12), ('standard', {'checkpoint_blocks': True}, 512, 24),
    ('standard', {'window': 64}, 512, 12), ('standard', {}, 4096, 2),
    ('sps', {}, 256, 12), ('sps', {}, 512, 6), ('sps', {'checkpoint_blocks': True}, 512, 12), ('sps', {}, 4096, 1),
    ('sps', {'method': 'two_x_memory', 'window': None}, 256, 12), ('sps', {'method': 'delayed_state'}, 256, 12),
    ('sps', {'method': 'reverse_sps'}, 512, 6),
    ('context_ready', {'K': 1}, 256, 24), ('context_ready', {'K': 3}, 256, 8), ('context_ready', {'K': 3}, 512, 4),
    ('context_ready', {'K': 5, 'checkpoint_unrolls': True}, 256, 16),
    ('nextlat', {'horizon': 1}, 512, 8), ('nextlat', {'horizon': 4}, 256, 12), ('mtp', {'horizon': 2}, 256, 12)]


def config(name, settings, toy):
    return runs.make_config(name, {**VOCABULARY, **(TOY_SHAPE if toy else SHAPE), **settings})


def estimated(name, settings, T, rows, toy=False) -> float:
    model = runs.blank_model(name, config(name, settings, toy))
    fixed, per_row = bytes_by_rows(model, torch.float32, T)
    return 16 * runs.count_parameters(model) + fixed + per_row * rows


def measured(name, settings, T, rows, toy=False) -> int:
    """Return the bytes at the peak of two steps relative to those before; to be called in a fresh process."""
    steps(name, config(name, settings, True), T, 2)  # code and tables that any model needs
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # resets the peak
    before = resident()['held']
    steps(name, config(name, settings, toy), T, rows)
    return resident()['peak'] - before


def steps(name, c, T, rows):
    torch.manual_seed(0)
    model = runs.model_file(name).Model(c)
    optimizer = train.make_optimizer(model, train.Settings())
    idx = torch.randint(0, 4096, (rows, T))
    for _ in range(2):
        model(idx, idx)['loss'].backward()
        optimizer.step()  # gradients are kept, as between micro-batches


def rows(toy: bool):
    for name, settings, T, n_rows in CASES[:1] if toy else CASES:
        case = name, settings, 32 if toy else T, 2 if toy else n_rows
        peak = apart(measured, *case, toy, MALLOC_MMAP_THRESHOLD_='65536')
        needed = estimated(*case, toy)
        yield {'model': name, **settings, 'T': case[2], 'rows': case[3], 'estimated_mib': round(needed / 2 ** 20),
               'measured_mib': round(peak / 2 ** 20), 'estimated_over_measured': round(needed / peak, 3)}


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    write_results('memory', rows(toy), toy=toy)


if __name__ == '__main__':
    main()
