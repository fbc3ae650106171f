"""What the checks cost that find damaged files and numbers that are not finite, as a share of a training step.

    python -m bench.checks [--toy]

Each check is timed by itself, at the size of `quickstart` and of 8 layers x 512 (T 256, batch 8, vocabulary 50304), and
set beside train.py's step there, on one thread. What happens once in a while is spread over the steps between. Then
whole steps run in turn with all of a step's checks and without them: less exact than the sum, as machines are noisy,
but nothing is forgotten there.
"""
import contextlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import train
from bench import alternate, options, write_results
from common import checkpoint, machine, runs
from data.shards import MIB, Data, write_data
from data.tokenizers import Tokenizer

SIZES = {  # name: model, its Config, settings
    'quickstart': ('sps', dict(n_layer=4, n_head=6, n_embd=192, vocab_size=320, n_ids=257, eos_id=256),
                   dict(block_size=256, batch_size=4, save_interval=800)),
    '8 x 512': ('standard', dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50304, n_ids=50257, eos_id=50256),
                dict(block_size=256, batch_size=8))}
TOY_SIZES = {'toy': ('standard', dict(n_layer=1, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256),
                     dict(block_size=16, batch_size=2))}


class Mapped:
    """A shard as a map of its file: how a reader without checks would read it."""

    def __init__(self, shard):
        self.tokens = np.memmap(shard.path, shard.dtype, 'r')

    def ids(self, start, count):
        return self.tokens[start:start + count]


def make_data(folder: Path, n_ids: int, n_tokens: int) -> tuple[Data, Data]:
    """Random ids as train.py reads them, and the same as a map of the file."""
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer('byte', n_ids, n_ids - 1, lambda text: rng.integers(0, n_ids - 1, len(text)).tolist(), bytes)
    document = ' ' * 499
    write_data(folder, tokenizer, [('train', document)] * (n_tokens // 500) + [('val', document)] * 2)
    checked, mapped = Data(folder), Data(folder)
    for split, shards in mapped.shards.items():
        mapped.shards[split] = [Mapped(shard) for shard in shards]
    return checked, mapped


def in_turn(sides: dict, rounds: int) -> dict[str, float]:
    """`alternate` by processor time, in which the other work of a shared machine does not count; with a GPU, by the
    clock."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    return alternate(sides, rounds, warmup=0, clock=clock)


def seconds_of(function: Callable, calls: int) -> float:
    return in_turn({'it': function}, calls)['it']


@contextlib.contextmanager
def without_checks(optimizer) -> Iterator[None]:
    """Steps take any gradient."""
    checked, train.skip_if_not_finite = train.skip_if_not_finite, lambda *_: None
    optimizer.found_inf = None
    try:
        yield
    finally:
        train.skip_if_not_finite = checked


def measure(size: str, model_name: str, config: dict, settings: dict, folder: Path, toy: bool) -> Iterator[dict]:
    s = train.Settings(threads=1, **settings)
    here = replace(machine.start_processes(s), launcher=os.getppid())  # as under torchrun
    torch.manual_seed(0)
    module = runs.model_file(model_name)
    model = module.Model(module.Config(**config)).to(here.device)
    here.dtype = machine.pick_dtype('auto', here.device.type, runs.count_parameters(model) >= train.BF16_PARAMETERS)
    optimizer, skips = train.make_optimizer(model, s), torch.zeros(3, device=here.device)
    checked, mapped = make_data(folder, config['n_ids'], 50_000 if toy else 4_000_000)
    steps = iter(range(10 ** 9))

    def step():
        return train.train_step(model, model, optimizer, checked, s, next(steps), here, skips, here.is_orphan())

    def plain_step():
        with without_checks(optimizer):
            train.train_step(model, model, optimizer, mapped, s, next(steps), here, skips, False)
    parts, norm, _ = step()
    plain_step()
    seconds = in_turn({'checked': step, 'plain': plain_step}, rounds=2 if toy else 15)
    calls = 3 if toy else 90
    sums = sum_of_checks(model, optimizer, checked, mapped, s, here, parts, norm, skips, calls)
    for check, cost in sums.items():
        yield {'size': size, 'check': check, 'us_per_step': round(1e6 * cost, 2),
               'percent_of_step': round(100 * cost / seconds['plain'], 4)}
    yield {'size': size, 'check': 'all of these', 'us_per_step': round(1e6 * sum(sums.values()), 2),
           'percent_of_step': round(100 * sum(sums.values()) / seconds['plain'], 4)}
    yield {'size': size, 'check': 'whole steps in turn', 'ms_plain': round(1e3 * seconds['plain'], 3),
           'ms_checked': round(1e3 * seconds['checked'], 3),
           'ratio': round(seconds['checked'] / seconds['plain'], 4)}


def sum_of_checks(model, optimizer, checked, mapped, s, here, parts, norm, skips, calls) -> dict[str, float]:
    """{check: its seconds per step}; 0 where a difference is lost in the noise."""
    T, batch = s.block_size, s.batch_size
    numbers = train.read_numbers(parts, norm, here)
    line = {'step': 1000, 'tokens': 10 ** 6, 'seconds': 100.0, **numbers, 'lr': 6e-4, 'tokens_per_s': 1e4, 'mfu': 0.5}
    text = json.dumps(line).encode()
    shard = checked.shards['train'][0]
    windows = iter(range(10 ** 9))
    reads = in_turn({name: lambda data=data: data.train_batch(next(windows), batch, T, s.seed)
                       for name, data in (('checked', checked), ('mapped', mapped))}, rounds=calls)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    updates = in_turn({'found_inf': optimizer.step, 'plain': lambda: step_without(optimizer)}, rounds=calls // 3)
    tensors = {'model': checkpoint.own_tensors(model),
               'optimizer': {f'{i} {key}': value for i, state in enumerate(optimizer.state.values())
                             for key, value in state.items()}}
    return {
        'positioned reads instead of a map': max(0, reads['checked'] - reads['mapped']),
        'crc32 of each MiB as it is first read, over an epoch':
            seconds_of(lambda: shard._check(0), calls) * batch * T * shard.dtype.itemsize / MIB,
        'gradient norm finite, skips counted': seconds_of(lambda: train.skip_if_not_finite(optimizer, norm, skips),
                                                          calls),
        'AdamW with found_inf': max(0, updates['found_inf'] - updates['plain']),
        'skips read for the log': seconds_of(lambda: train.read_skips(s, 1, skips, 0.0), calls) / s.log_interval,
        "crc32 of the log's line": seconds_of(lambda: zlib.crc32(text), calls) / s.log_interval,
        'launcher still there': seconds_of(here.is_orphan, calls),
        'finite weights and moments before they are saved':
            seconds_of(lambda: [checkpoint.not_finite(part) for part in tensors.values()], 3) / s.save_interval,
    }


def step_without(optimizer):
    found_inf, optimizer.found_inf = optimizer.found_inf, None
    optimizer.step()
    optimizer.found_inf = found_inf


def figures(sizes: dict, toy: bool) -> Iterator[dict]:
    for size, (model_name, config, settings) in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(size, model_name, config, settings, Path(folder) / 'data', toy)


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    write_results('checks', figures(TOY_SIZES if toy else SIZES, toy), toy=toy)


if __name__ == '__main__':
    main()
