"""The shard format, reading it, and the order of training data. writing.py writes it.

A data folder holds shards of token ids (integers without a header) and meta.json:

    {"tokenizer": "byte", "n_ids": 257, "eos_id": 256, "bos": false, "dtype": "uint16", "splits": {
    "train": {"tokens", "documents", "bytes", "shards": [{"file", "tokens", "sha256"}]}, "val": {}}}

One eos follows each document. With "bos", each document also starts with the tokenizer's bos.
"""
import bisect
import hashlib
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from lm_architectures.files import ROOT, UserError, read_json, sha256

BUILT = Path(os.environ.get('BUILT_DATA') or ROOT / 'data/built')  # generated data folders, ignored by git


def check_meta(meta: dict) -> None:
    """Raise ValueError if meta.json has a value of the wrong type or out of range."""
    try:
        splits = [meta['splits'][name] for name in ('train', 'val')]
        shards = [shard for split in splits for shard in split['shards']]
        names = [meta['tokenizer'], *(shard[key] for shard in shards for key in ('file', 'sha256'))]
        counts = [meta['n_ids'], *(split[key] for split in splits for key in ('tokens', 'documents', 'bytes')),
                  *(shard['tokens'] for shard in shards)]
        is_right = (all(type(n) is int and 0 < n < 2 ** 63 for n in counts) and meta['dtype'] in ('uint16', 'uint32')
                    and type(meta['eos_id']) is int and 0 <= meta['eos_id'] < meta['n_ids'] <= 2 ** 32
                    and all(re.fullmatch('[0-9A-Za-z_. -]{1,99}', name) for name in names)  # plain file names
                    and all(split['tokens'] == sum(shard['tokens'] for shard in split['shards']) for split in splits))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{type(error).__name__}: {error}')
    if not is_right:
        raise ValueError('a value is out of range')


class Data:
    """A data folder. UserError if meta.json is damaged, or a shard is missing or truncated."""

    def __init__(self, folder):
        self.folder, self.sources, self.T = Path(folder), {str(folder): (1.0, self)}, None
        meta = read_json(self.folder / 'meta.json', 'copy or build the data again', check_meta)
        self.tokenizer, self.n_ids, self.eos_id = meta['tokenizer'], meta['n_ids'], meta['eos_id']
        self.bos = bool(meta.get('bos'))  # whether documents start with bos
        if self.tokenizer not in ('byte', 'gpt2'):  # a file or folder next to meta.json
            self.tokenizer = str((self.folder / self.tokenizer).resolve())
        self.splits, self.dtype = meta['splits'], np.dtype(meta['dtype'])
        self.starts = {split: [0, *itertools.accumulate(shard['tokens'] for shard in self.splits[split]['shards'])]
                       for split in ('train', 'val')}  # each shard's start, then the total
        self.shards = [(self.folder / shard['file'], shard) for split in self.starts
                       for shard in self.splits[split]['shards']]
        for path, shard in self.shards:
            size = shard['tokens'] * self.dtype.itemsize
            have = f'has {path.stat().st_size} bytes' if path.is_file() else 'is missing'
            if have != f'has {size} bytes':
                raise UserError(f'{path} {have}, expected {size} bytes: copy or build the data again')

    @property
    def sha256(self) -> str:
        """Checksum of all shards, which a resumed run compares."""
        return hashlib.sha256(json.dumps(self.splits, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Read every shard and compare its SHA-256 with meta.json."""
        for path, shard in self.shards:
            if sha256(path) != shard['sha256']:
                raise UserError(f'{path} does not match its checksum in meta.json: copy or build the data again')

    def tokens(self, split: str, start: int, count: int) -> np.ndarray:
        """Return `count` token ids of a split from position `start`, across shards: int64."""
        parts, starts = [], self.starts[split]
        while count > 0:
            i = bisect.bisect(starts, start) - 1
            path, offset = self.folder / self.splits[split]['shards'][i]['file'], start - starts[i]
            n = min(count, starts[i + 1] - start)
            parts.append(np.fromfile(path, self.dtype, n, offset=offset * self.dtype.itemsize))
            if len(parts[-1]) < n:
                raise UserError(f'{path} was cut while it was in use: copy or build the data again')
            start, count = start + n, count - n
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.n_ids:
            raise UserError(f'{self.folder} contains id {ids.max()}, but its tokenizer has {self.n_ids} ids: '
                            'build the data again')
        return ids

    def n_rows(self, split: str, T: int) -> int:
        """Return the number of rows of T tokens. UserError if it is 0.

        Training epochs start at different offsets.
        """
        total, needed = self.starts[split][-1], 2 * T if split == 'train' else T + 1
        if total < needed:
            raise UserError(f'{self.folder} has {total} {split} tokens, too few for a window of block_size = {T}, '
                            f'which needs {needed}: use a smaller block_size or more data')
        return total // T - 1 if split == 'train' else (total - 1) // T

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """Return idx, targets (part of batch_size, T) int64, a pure function of the arguments.

        Each epoch reads all rows once, in an order and from an offset of its own.
        """
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)[part]
        rows, own = shuffled(numbers, self.n_rows('train', T), seed)
        starts = rows * T + (own % T).astype(np.int64)
        return self._batch('train', starts.tolist(), T)

    def val_batch(self, numbers, T: int, seed: int | None = None) -> tuple:
        """Return idx, targets (len(numbers), T) int64 of the validation rows with these numbers.

        Rows are consecutive from the start, or, with a seed, at random offsets that depend on seed
        and number. Row n_rows has the remaining tokens, padded with eos and target -1.
        """
        starts = [n * T for n in numbers]
        if seed is not None:
            n_starts = self.starts['val'][-1] - T
            starts = [int(np.random.default_rng([seed, n]).integers(n_starts)) for n in numbers]
        return self._batch('val', starts, T)

    def _batch(self, split: str, starts: list[int], T: int) -> tuple:
        rows = torch.full((len(starts), T + 1), -1)
        for row, start in zip(rows, starts):
            ids = self.tokens(split, start, min(T + 1, self.starts[split][-1] - start))
            row[:len(ids)] = torch.from_numpy(ids)
        return rows[:, :-1].masked_fill(rows[:, :-1] < 0, self.eos_id), rows[:, 1:]

    def example(self, T: int, new_tokens: int) -> tuple[list[int], int]:
        """Return a prompt (the start of the validation set) and how many of new_tokens fit in T."""
        new_tokens = min(new_tokens, T // 2)
        return self.tokens('val', 0, min(32, T - new_tokens)).tolist(), new_tokens


# ---- the order of training ----

def shuffled(numbers: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row for each number, and a random number per epoch: int64, uint64."""
    epochs, index = np.divmod(numbers, n)
    rows, own = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.uint64)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        *keys, number = [int.from_bytes(hashlib.sha256(f'{seed} {epoch} {j}'.encode()).digest()[:8], 'little')
                         for j in range(5)]
        rows[in_epoch], own[in_epoch] = permute(index[in_epoch], n, keys), number
    return rows, own


def permute(index: np.ndarray, n: int, keys: list[int]) -> np.ndarray:
    """Apply a pseudo-random permutation of range(n) to indices, without storing it.

    A Feistel network on the next power of 4, repeated for results outside range(n) (cycle walking).
    Sums and products are modulo 2^64.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    place, outside = index.astype(np.uint64), np.arange(len(index))
    while len(outside):
        left, right = place[outside] >> half, place[outside] & mask
        for key in keys:
            mixed = (right + key) * 0x9E3779B97F4A7C15
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9
            left, right = right, left ^ (mixed >> 32) & mask
        place[outside] = left << half | right
        outside = outside[place[outside] >= n]
    return place
