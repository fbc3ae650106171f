"""Synthetic tasks: built-in data that is not stored; `Generated` creates rows when they are read.

A task's file has a dataclass Task, whose fields are options: 'path_star:degree=2,length=5'. It has

    symbols                     text of each token id; the next id is eos, used in packed rows
    row_tokens                  tokens per row, T + 1: T inputs and, shifted by one, T targets
    train_rows, val_rows        rows of the fixed training set (None: unlimited); held-out rows
    row(rng, split)             a row's ids (T + 1,); depends only on the numpy generator and split
    targets(rows)               targets (B, T) of rows (B, T + 1); -1 where none counts
    score(model, idx, targets, device, batch_size)   {name: exact score} on held-out rows (n, T)
    symbol_options              options that a run and its evaluation data must share
"""
import functools
import hashlib
import math
import re
from dataclasses import fields

import numpy as np
import torch

from lm_architectures.data.tasks import task_class
from lm_architectures.data.text.shards import shuffled
from lm_architectures.decode.generation import generate
from lm_architectures.files import UserError
from lm_architectures.settings import Text, check_ranges, make_settings

SOLVED = 0.99  # accuracy from which a task, or a level of it, counts as solved
MEMBERS = 'symbols', 'row_tokens', 'train_rows', 'val_rows', 'row', 'targets', 'score', 'symbol_options'
MAX_CACHED_BYTES = 2 ** 30  # rows of fixed training sets stay in memory if all rows take at most this


# ---- a task by name ----

def make_task(name: str):
    """Create the Task for 'task' or 'task:option=value,...'. UserError for invalid options."""
    options = [option.partition('=') for option in filter(None, name.partition(':')[2].split(','))]
    task = make_settings(task_class(name), {key: Text(value) for key, _, value in options}, f'in data {name!r}')
    if missing := [member for member in MEMBERS if not hasattr(task, member)]:
        raise UserError(f'the Task of {name} has no {", ".join(missing)}: see lm_architectures/data/generated.py')
    check_ranges(task, train_rows=(1, 10 ** 12), val_rows=(1, 10 ** 7))
    return task


def symbol_tokenizer(name: str) -> dict:
    """Return the fields of a task's Tokenizer. Texts may have spaces and commas between symbols."""
    symbols = make_task(name).symbols
    id_of, pattern = {symbol: i for i, symbol in enumerate(symbols)}, symbol_pattern(symbols)

    def encode(text):
        try:
            return [id_of[symbol] for symbol in re.findall(pattern, text)]
        except KeyError as symbol:
            raise UserError(f'unknown symbol {symbol} in {name}: expected one of {symbols[0]} ... {symbols[-1]}')
    return {'n_ids': len(symbols) + 1, 'eos_id': len(symbols), 'encode': encode,
            'token_bytes': lambda i: f' {symbols[i]}'.encode() if i < len(symbols) else b''}


def symbol_pattern(symbols: list[str]) -> str:
    """Return a regular expression that matches one symbol: a word, a sign, or another symbol."""
    others = [symbol for symbol in symbols if not re.fullmatch(r'\w+|[^\w\s,]', symbol)]
    return '|'.join([*map(re.escape, sorted(others, key=len, reverse=True)), r'\w+', r'[^\w\s,]'])


# ---- their rows as data ----

class Generated:
    """Rows of a synthetic task, generated when they are read, with the methods of Data.

    A row depends on its split and number. Unlimited training rows also depend on the seed. A fixed
    training set is the same for all seeds; only its order changes.
    """

    def __init__(self, name):
        self.task, kind = make_task(name), name.partition(':')[0]
        options = {f.name: f'{f.name}={getattr(self.task, f.name)}' for f in fields(self.task)}
        self.folder = f'{kind}:{",".join(options.values())}'
        self.sources = {self.folder: (1.0, self)}
        self.tokenizer = f'{kind}:{",".join(options[key] for key in self.task.symbol_options)}'.removesuffix(':')
        if make_task(self.tokenizer).symbols != self.task.symbols:
            raise UserError(f'the symbols of {self.folder} depend on options that are not in its symbol_options')
        self.n_ids, self.eos_id, self.bos = len(self.task.symbols) + 1, len(self.task.symbols), False
        self.T = self.task.row_tokens - 1
        n_rows = {'train': self.task.train_rows, 'val': self.task.val_rows}
        self.splits = {split: {'tokens': n and n * self.T, 'documents': n} for split, n in n_rows.items()}
        n_cached = (self.task.train_rows or math.inf) + self.task.val_rows
        n_bytes = n_cached * (8 * self.task.row_tokens + 400)  # 400: overhead of an array
        self.row = functools.lru_cache(None if n_bytes <= MAX_CACHED_BYTES else 0)(self._row)

    @property
    def sha256(self) -> str:
        """Checksum of the options and some rows, which a resumed run compares."""
        rows = np.concatenate([self.rows(split, range(8), 0) for split in self.splits])
        return hashlib.sha256(self.folder.encode() + rows.astype('<i8').tobytes()).hexdigest()

    def verify(self):
        """Do nothing: no data is stored."""

    def rows(self, split: str, numbers, seed: int) -> np.ndarray:
        """Return the rows of a split with these numbers, int64 (len(numbers), T + 1)."""
        is_fixed = split == 'val' or self.task.train_rows is not None
        return np.stack([self.row(split, 0 if is_fixed else seed, int(i)) for i in numbers]).astype(np.int64)

    def _row(self, split: str, seed: int, i: int) -> np.ndarray:
        return self.task.row(np.random.default_rng([split == 'val', seed, i]), split)

    def n_rows(self, split: str, T: int) -> float:
        """Return the number of rows of a split, infinite if unlimited. T must be the task's T."""
        if T != self.T:
            raise UserError(f'block_size is {T}, but rows of {self.folder} have {self.T} inputs: set '
                            f'block_size to {self.T}')
        return self.splits[split]['documents'] or math.inf

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """Return idx, targets (part of batch_size, T) int64, a pure function of the arguments."""
        numbers, n = np.arange(step * batch_size, (step + 1) * batch_size)[part], self.n_rows('train', T)
        if n < math.inf:
            numbers, _ = shuffled(numbers, n, seed)
        return self._batch(self.rows('train', numbers, seed))

    def val_batch(self, numbers, T: int, seed: int | None = None) -> tuple:
        """Return idx, targets (len(numbers), T) int64 of these held-out rows. Ignores the seed."""
        return self._batch(self.rows('val', numbers, 0))

    def _batch(self, rows):
        rows = torch.from_numpy(rows)
        return rows[:, :-1], self.task.targets(rows)

    def example(self, T: int, new_tokens: int) -> tuple[list[int], int]:
        """Return the start of a held-out row, up to its last answer, and that answer's length."""
        idx, targets = self.val_batch([0], T)
        last = int((targets[0] >= 0).nonzero()[-1])
        before = (targets[0, :last] < 0).nonzero()
        prompt_tokens = int(before[-1]) + 2 if len(before) else last + 1
        return idx[0, :prompt_tokens].tolist(), last + 2 - prompt_tokens

    def score(self, model, device, batch_size: int) -> dict[str, float]:
        """Return the exact scores {name: value} of a model in eval mode on all held-out rows."""
        idx, targets = self.val_batch(range(self.task.val_rows), self.T)
        return self.task.score(model, idx, targets, device, batch_size)


@torch.no_grad()
def greedy_tokens(model, idx, device, batch_size: int) -> torch.Tensor:
    """Return the argmax token at each position: idx (n, T) -> (n, T) int64, on the CPU."""
    return torch.cat([model.logits(part.to(device)).argmax(-1).cpu() for part in idx.split(batch_size)])


def greedy_answers(model, prompts: list[list[int]], n_new: int, batch_size: int, eos_id: int | None = None) -> list:
    """Return the greedy continuation of each prompt: lists of up to n_new ids."""
    return [ids for start in range(0, len(prompts), batch_size)
            for ids in generate(model, prompts[start:start + batch_size], n_new, temperature=0, eos_id=eos_id)]
