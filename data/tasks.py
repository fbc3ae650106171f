"""Synthetic tasks: built-in data that is never written, as `Generated` makes each row when it is read.

Such a file has a dataclass Task, whose fields are the options of its name, as in 'path_star:degree=2,length=5', and which has

    symbols                     the text of each token id; the id after the last one is eos, which no row contains
    row_tokens                  tokens of a row, T + 1: a row is T inputs and, one further, their T targets
    train_rows, val_rows        rows of the fixed training set, None for fresh rows without end; rows held out
    row(rng)                    a row's ids, (T + 1,), a function of numpy's generator alone
    counted(idx)                (B, T) bool: the positions whose targets count; all other targets are -1
    score(model, idx, targets, device, batch_size)   {name: exact score} on held-out rows (n, T)
"""
import difflib
import hashlib
import importlib
import math
import typing
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from common.files import UserError
from common.settings import Text, typed
from data.shards import shuffled


def builtin_data():
    files = {p.stem for p in Path(__file__).parent.glob('[a-z]*.py')}
    return sorted(files - {'shards', 'tasks', 'tokenizers'})


def task_class(name):
    """The Task class of the synthetic task that a data name begins with, or None."""
    kind = str(name).partition(':')[0]
    return getattr(importlib.import_module(f'data.{kind}'), 'Task', None) if kind in builtin_data() else None


def make_task(name):
    """The Task of a data name 'task' or 'task:option=value,...'; UserError for an option or a value that it does not take."""
    Task, where = task_class(name), f'in data {name!r}'
    types_of, values = typing.get_type_hints(Task), {}
    for option in filter(None, name.partition(':')[2].split(',')):
        key, _, value = option.partition('=')
        if key not in types_of:
            near = difflib.get_close_matches(key, types_of, 3, 0.4) or types_of
            raise UserError(f'unknown option {key!r} {where}: did you mean {" or ".join(map(repr, near))}?')
        values[key] = typed(key, Text(value), types_of[key], where)
    try:
        return Task(**values)
    except ValueError as error:
        raise UserError(f'data {name!r}: {error}')


class Generated:
    """The rows of a synthetic task, made when they are read. In its functions as Data: what reads one reads the other.

    A row is a function of its split and number, and where training rows are fresh without end, of the seed: then row i of
    training is the i-th that any run with that seed reads. A fixed training set is the same for all seeds, its order is not.
    """

    def __init__(self, name):
        self.task, kind = make_task(name), name.partition(':')[0]
        options = {f.name: getattr(self.task, f.name) for f in fields(self.task)}
        full = lambda options: f'{kind}:{",".join(f"{key}={value}" for key, value in options.items())}'
        self.folder = full(options)
        self.tokenizer = full({key: value for key, value in options.items() if not key.endswith('_rows')})  # how many rows is not its matter
        self.n_ids, self.eos_id = len(self.task.symbols) + 1, len(self.task.symbols)
        self.T = self.task.row_tokens - 1
        count = {'train': self.task.train_rows, 'val': self.task.val_rows}
        self.splits = {split: {'tokens': rows and rows * self.T, 'documents': rows} for split, rows in count.items()}

    @property
    def sha256(self):
        """A checksum of the options and of some rows, by which a resumed run knows its data, made by the same code."""
        rows = np.concatenate([self.rows(split, range(8), 0) for split in self.splits])
        return hashlib.sha256(self.folder.encode() + rows.astype('<i8').tobytes()).hexdigest()

    def verify(self):
        """Nothing is stored that could be damaged."""

    def rows(self, split, numbers, seed):
        """The rows of a split with these numbers, int64 (len(numbers), T + 1)."""
        stream = seed if split == 'train' and self.task.train_rows is None else 0
        return np.stack([self.task.row(np.random.default_rng([split == 'val', stream, i])) for i in numbers])

    def tokens(self, split, start, count):
        """count token ids from position start of a split's rows, written one after the other (fresh ones: those of seed 0)."""
        n = self.T + 1
        first, end = start // n, -(-(start + count) // n)
        return self.rows(split, range(first, end), 0).ravel()[start - first * n:][:count]

    def n_windows(self, split, T):
        """Rows of a split, infinite where training rows are fresh. T must be the task's."""
        if T != self.T:
            raise UserError(f'block_size is {T}, but a row of {self.folder} is {self.T} inputs and their targets: set block_size to {self.T}')
        rows = self.splits[split]['documents']
        return math.inf if rows is None else rows

    def train_batch(self, step, batch_size, T, seed, rows=slice(None)):
        """idx, targets (rows of batch_size, T) int64 of a training step: a pure function of its arguments."""
        numbers, n = range(step * batch_size, (step + 1) * batch_size)[rows], self.n_windows('train', T)
        return self._batch(self.rows('train', numbers if n == math.inf else [shuffled(i, n, seed)[0] for i in numbers], seed))

    def val_batch(self, windows, T):
        """idx, targets (len(windows), T) int64 of the held-out rows with these numbers."""
        return self._batch(self.rows('val', windows, 0))

    def _batch(self, rows):
        rows = torch.from_numpy(rows)
        idx = rows[:, :-1]
        return idx, rows[:, 1:].masked_fill(~self.task.counted(idx), -1)

    def example(self, T, new_tokens):
        """The first held-out row up to its last answer, and how many ids that answer has."""
        idx, targets = self.val_batch([0], T)
        prompt = int((targets[0] < 0).nonzero()[-1]) + 2
        return idx[0, :prompt].tolist(), T + 1 - prompt

    def score(self, model, device, batch_size):
        """The task's exact scores {name: value} of a model in eval mode, over all held-out rows."""
        return self.task.score(model, *self.val_batch(range(self.task.val_rows), self.T), device, batch_size)


@torch.no_grad()
def greedy_tokens(model, idx, device, batch_size):
    """The token that the model holds likeliest after each position. idx (n, T) -> (n, T) int64, on the CPU."""
    return torch.cat([model.logits(part.to(device)).argmax(-1).cpu() for part in idx.split(batch_size)])
