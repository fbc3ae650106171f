"""The shard format: writing it, reading it, and the order in which training reads it.

A data folder holds shards of token ids (integers without a header) and meta.json, which describes them:

    {"tokenizer": "byte", "n_ids": 257, "eos_id": 256, "bos": false, "dtype": "uint16", "splits": {"train": {"tokens":
     ..., "documents": ..., "bytes": ..., "shards": [{"file", "tokens", "sha256"}]}, "val": ...}}

One eos follows each document. With "bos", each document also starts with the tokenizer's bos.
"""
import bisect
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
from pathlib import Path

import numpy as np
import torch

from common.files import ROOT, UserError, read_json, sha256, write_file, write_json

BUILT = Path(os.environ.get('BUILT_DATA') or ROOT / 'data/built')  # built-in data and texts; ignored by git
VAL_SHARE = 0.05  # of the documents of built-in data and of texts
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model', 'gpt2_vocabulary')  # in data and run folders; the last a folder

# ---- writing ----

class ShardWriter:
    """Write the shards of a data folder: `add` documents, then `finish`. The document that fills a shard ends it.

    splits {split: {'tokens', 'documents', 'bytes', 'shards'}}: what an interrupted writer had written at its last
    `flush`. The shards are compared with their checksums, and writing continues behind them.
    """

    def __init__(self, folder, tokenizer, shard_tokens, splits=None):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype = dtype_of(tokenizer)
        self.splits = splits or {}
        self.files = {}  # by split: the shard that is being written
        for split, info in self.splits.items():
            for shard in info['shards']:
                self._continue(split, shard)

    @property
    def n_tokens(self) -> int:
        return sum(info['tokens'] for info in self.splits.values())

    def _continue(self, split: str, shard: dict) -> None:
        """Cut a shard of an interrupted writer to its recorded size and check it. If it isn't full, open it."""
        path, size = self.folder / shard['file'], shard['tokens'] * np.dtype(self.dtype).itemsize
        is_whole = path.is_file() and path.stat().st_size >= size
        if is_whole:
            os.truncate(path, size)
        if not is_whole or sha256(path) != shard['sha256']:
            raise UserError(f'{path} is missing or does not match its checksum in progress.json: remove {self.folder} '
                            'and start again')
        if shard['tokens'] < self.shard_tokens:
            self.files[split] = open(path, 'ab')

    def add(self, split: str, ids, n_bytes: int) -> bool:
        """Add a document (its eos included) of n_bytes of text. Return True if it fills a shard."""
        info = self.splits.setdefault(split, {'tokens': 0, 'documents': 0, 'bytes': 0, 'shards': []})
        if split not in self.files:
            name = f'{split}_{len(info["shards"]):05d}.bin'
            info['shards'].append({'file': name, 'tokens': 0, 'sha256': ''})
            self.files[split] = open(self.folder / name, 'wb')
        self.files[split].write(np.asarray(ids, self.dtype).tobytes())
        shard = info['shards'][-1]
        shard['tokens'] += len(ids)
        info['tokens'] += len(ids)
        info['documents'] += 1
        info['bytes'] += n_bytes
        is_full = shard['tokens'] >= self.shard_tokens
        if is_full:
            self.flush()
            self.files.pop(split).close()
        return is_full

    def flush(self) -> None:
        """Write everything added so far to disk, so that `splits` describes the files."""
        for split, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            shard = self.splits[split]['shards'][-1]
            shard['sha256'] = sha256(self.folder / shard['file'])

    def finish(self) -> None:
        """Complete the data folder. Raises UserError if a split has no text."""
        self.flush()
        for file in self.files.values():
            file.close()
        n_bytes = [self.splits.get(split, {'bytes': 0})['bytes'] for split in ('train', 'val')]
        if 0 in n_bytes:
            raise UserError(f'the data would have {n_bytes[0]:,} bytes of text in its split train and {n_bytes[1]:,} '
                            'in val, expected some in both: give more text, or a larger --max_tokens')
        write_json(self.folder / 'meta.json', {
            'tokenizer': keep_tokenizer(self.folder, self.tokenizer.name), 'n_ids': self.tokenizer.n_ids,
            'eos_id': self.tokenizer.eos_id, 'bos': bool(self.tokenizer.start), 'dtype': self.dtype,
            'splits': self.splits})


def keep_tokenizer(folder, name: str) -> str:
    """Copy the file or folder of a tokenizer into a folder. Return what meta.json calls it.

    Names that are not paths are returned as they are.
    """
    path, own_name, files = Path(name), 'gpt2_vocabulary', ['encoder.json', 'vocab.bpe']
    if path.is_file():
        own_name, files = ('tokenizer.model' if path.suffix == '.model' else 'tokenizer.json'), ['']
    elif not (path / files[0]).is_file():
        return name
    for file in files:
        target = Path(folder) / own_name / file
        target.parent.mkdir(exist_ok=True)
        write_file(target, (path / file).read_bytes())
    return own_name


def write_data(folder, tokenizer, documents, shard_tokens: int = 100_000_000) -> None:
    """Build a data folder from documents, an iterable of (split, text) with the splits 'train' and 'val'.

    The folder appears when it is complete. Raises UserError if it exists or if a split has no text.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f'{folder} exists: remove it first, or write to another folder')
    temporary = folder.with_name(f'.{folder.name}.{secrets.token_hex(4)}')
    temporary.mkdir(parents=True)
    try:
        writer = ShardWriter(temporary, tokenizer, shard_tokens)
        for split, text in documents:
            writer.add(split, document_ids(tokenizer, text), len(text.encode()))
        writer.finish()
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def dtype_of(tokenizer) -> str:
    return 'uint16' if tokenizer.n_ids <= 2 ** 16 else 'uint32'


def document_ids(tokenizer, text: str) -> np.ndarray:
    """Return the ids of a document with its eos, and with bos if the tokenizer was loaded with it."""
    encode, dtype = tokenizer.encode_document or tokenizer.encode, dtype_of(tokenizer)
    return np.concatenate([np.asarray(ids, dtype) for ids in (tokenizer.start, encode(text), [tokenizer.eos_id])])


def split_of(text: str, val_share: float = VAL_SHARE, val_hash: str = 'sha256') -> str:
    """Return 'train' or 'val' by a hash of a document's text or id, so that duplicates are in the same split."""
    return 'val' if hash_share(text, val_hash) < val_share else 'train'


def hash_share(text: str, val_hash: str) -> float:
    """Return the first 8 bytes of a text's hash as a share of 2^64. md5 with '42:' is the official SPS code's."""
    if val_hash == 'md5':
        return int.from_bytes(hashlib.md5(f'42:{text}'.encode()).digest()[:8], 'little') / 2 ** 64
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64


# ---- reading ----

def check_meta(meta: dict) -> None:
    """Raise ValueError if meta.json has a value of the wrong type or out of range."""
    try:
        splits = [meta['splits'][name] for name in ('train', 'val')]
        shards = [shard for split in splits for shard in split['shards']]
        names = [meta['tokenizer'], *(shard['file'] for shard in shards)]
        counts = [meta['n_ids'], *(split[key] for split in splits for key in ('tokens', 'documents', 'bytes')),
                  *(shard['tokens'] for shard in shards)]
        is_right = (all(type(n) is int and 0 < n < 2 ** 63 for n in counts) and meta['dtype'] in ('uint16', 'uint32')
                    and type(meta['eos_id']) is int and 0 <= meta['eos_id'] < meta['n_ids'] <= 2 ** 32
                    and all(re.fullmatch('[0-9A-Za-z_. -]{1,99}', name) for name in names)  # of files in this folder
                    and all(split['tokens'] == sum(shard['tokens'] for shard in split['shards']) for split in splits))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{type(error).__name__}: {error}')
    if not is_right:
        raise ValueError('a value is out of range')


class Data:
    """A data folder. Raises UserError if meta.json is damaged, or if a shard is missing or has the wrong size."""

    def __init__(self, folder):
        self.folder = Path(folder)
        meta = read_json(self.folder / 'meta.json', 'copy or build the data again', check_meta)
        self.tokenizer, self.n_ids, self.eos_id = meta['tokenizer'], meta['n_ids'], meta['eos_id']
        self.bos = bool(meta.get('bos'))  # whether documents start with bos
        if self.tokenizer not in ('byte', 'gpt2'):  # a file or folder beside meta.json
            self.tokenizer = str((self.folder / self.tokenizer).resolve())
        self.splits, self.dtype = meta['splits'], np.dtype(meta['dtype'])
        self.starts = {}  # by split: the position of each shard's first token
        for split in ('train', 'val'):
            shards = self.splits[split]['shards']
            self.starts[split] = [0, *itertools.accumulate(shard['tokens'] for shard in shards)]
            for shard in shards:
                path, size = self.folder / shard['file'], shard['tokens'] * self.dtype.itemsize
                have = f'has {path.stat().st_size} bytes' if path.is_file() else 'is missing'
                if have != f'has {size} bytes':
                    raise UserError(f'{path} {have}, meta.json says {size}; copy or build the data again')

    @property
    def sha256(self) -> str:
        """One checksum of all shards. A resumed run compares it."""
        return hashlib.sha256(json.dumps(self.splits, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Read every shard and compare its sha256 with meta.json."""
        for split in ('train', 'val'):
            for shard in self.splits[split]['shards']:
                path = self.folder / shard['file']
                if sha256(path) != shard['sha256']:
                    raise UserError(f'{path} does not match its checksum in meta.json; copy or build the data again')

    def tokens(self, split: str, start: int, count: int) -> np.ndarray:
        """Return count token ids of a split from position start, across shards: int64 (count,)."""
        parts, starts = [], self.starts[split]
        while count > 0:
            i = bisect.bisect(starts, start) - 1
            path, offset = self.folder / self.splits[split]['shards'][i]['file'], start - starts[i]
            n = min(count, starts[i + 1] - start)
            # mapped anew each time: maps that are kept would keep their files open, a thousand of them in large data
            parts.append(np.memmap(path, self.dtype, 'r', offset * self.dtype.itemsize, (n,)))
            start, count = start + n, count - n
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.n_ids:
            raise UserError(f'{self.folder} holds id {ids.max()}, but its tokenizer has only {self.n_ids} ids; '
                            'build the data again')
        return ids

    def n_windows(self, split: str, T: int) -> int:
        """Return the number of windows of T inputs and targets. A training epoch starts at any of T offsets."""
        total = self.starts[split][-1]
        return total // T - 1 if split == 'train' else (total - 1) // T

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """Return idx, targets (part of batch_size, T) int64 of a training step: a pure function of the arguments.

        Every epoch reads all windows once, in its own order and cut at its own offset.
        """
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)[part]
        windows, own = shuffled(numbers, self.n_windows('train', T), seed)
        starts = windows * T + (own % T).astype(np.int64)
        return self._windows('train', starts.tolist(), T)

    def val_batch(self, windows, T: int, seed: int | None = None) -> tuple:
        """Return idx, targets (len(windows), T) int64 of the validation windows with these numbers.

        Windows follow each other from the start. With a seed, window i is at a random offset, a function of seed and i.
        Window n_windows, of the tokens that remain, is short: it is filled with eos, and targets of -1.
        """
        starts = [w * T for w in windows]
        if seed is not None:
            n_starts = self.starts['val'][-1] - T
            starts = [int(np.random.default_rng([seed, w]).integers(n_starts)) for w in windows]
        return self._windows('val', starts, T)

    def _windows(self, split: str, starts: list[int], T: int) -> tuple:
        windows = torch.full((len(starts), T + 1), -1)
        for window, start in zip(windows, starts):
            ids = self.tokens(split, start, min(T + 1, self.starts[split][-1] - start))
            window[:len(ids)] = torch.from_numpy(ids)
        return windows[:, :-1].masked_fill(windows[:, :-1] < 0, self.eos_id), windows[:, 1:]

    def example(self, T: int, new_tokens: int) -> tuple[list[int], int]:
        """Return a prompt to continue (the start of the validation set) and how many of new_tokens fit into T."""
        new_tokens = min(new_tokens, T // 2)
        return self.tokens('val', 0, min(32, T - new_tokens)).tolist(), new_tokens


# ---- the order of training ----

def shuffled(numbers: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of n windows training reads under these numbers, and a number of each one's epoch: int64, uint64.

    Every epoch takes each window once, in its own order.
    """
    epochs, index = np.divmod(numbers, n)
    windows, own = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.uint64)
    for epoch in np.unique(epochs).tolist():
        of_epoch = epochs == epoch
        *keys, number = epoch_keys(seed, epoch)
        windows[of_epoch], own[of_epoch] = permute(index[of_epoch], n, keys), number
    return windows, own


@functools.lru_cache(8)
def epoch_keys(seed: int, epoch: int) -> list[int]:
    """Return five pseudo-random 64-bit numbers of an epoch."""
    return [int.from_bytes(hashlib.sha256(f'{seed} {epoch} {j}'.encode()).digest()[:8], 'little') for j in range(5)]


def permute(index: np.ndarray, n: int, keys: list[int]) -> np.ndarray:
    """Apply a pseudo-random permutation of range(n) to indices, without storing it.

    A Feistel network on the next power of 4, applied again to results outside range(n) (cycle walking). Sums and
    products are modulo 2^64.
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
