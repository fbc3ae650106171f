"""The shard format: writing it, reading it, and the order in which training reads it.

A data folder holds shards of token ids, little-endian and nothing else, and meta.json, which says all about them:

     {"tokenizer": "byte", "n_ids": 257, "eos_id": 256, "dtype": "uint16", "splits": {"train": {"tokens": ...,
     "documents": ..., "bytes": ..., "shards": [{"file", "tokens", "sha256"}]}, "val": ...}}

Every document is followed by one eos.
"""
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from common.files import UserError, write_file, write_json

BUILT = Path(__file__).resolve().parent / 'built'  # where built-in data and text folders go; ignored by git
VAL_SHARE = 0.05  # of the documents of built-in data and of text folders
PIECE = 10_000  # bytes of the documents that .txt files are cut into, about; less where there is little text


# ---- writing ----


class ShardWriter:
    """Writes the shards of a data folder: `add` documents, then `finish`. A shard ends with the document that fills it.

    splits {split: {'tokens', 'documents', 'bytes', 'shards'}} and pending {split: ids} continue an earlier writer.
    """

    def __init__(self, folder, tokenizer, shard_tokens, splits=None, pending=None):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype = np.dtype('<u2' if tokenizer.n_ids <= 2 ** 16 else '<u4')
        self.splits = splits or {}
        self.pending = {split: [ids] for split, ids in (pending or {}).items()}
        self.waiting = {split: len(ids) for split, ids in (pending or {}).items()}

    def add(self, split: str, ids, n_bytes: int) -> bool:
        """Adds a document, its eos included, that was n_bytes of text; True if that filled a shard."""
        info = self.splits.setdefault(split, {'tokens': 0, 'documents': 0, 'bytes': 0, 'shards': []})
        self.pending.setdefault(split, []).append(np.asarray(ids, self.dtype))
        self.waiting[split] = self.waiting.get(split, 0) + len(ids)
        info['tokens'] += len(ids)
        info['documents'] += 1
        info['bytes'] += n_bytes
        if self.waiting[split] < self.shard_tokens:
            return False
        self._flush(split)
        return True

    def _flush(self, split):
        shards = self.splits[split]['shards']
        tokens = np.concatenate(self.pending[split])
        name = f'{split}_{len(shards):05d}.bin'
        write_file(self.folder / name, tokens.data)
        shards.append({'file': name, 'tokens': len(tokens), 'sha256': hashlib.sha256(tokens).hexdigest()})
        self.pending[split], self.waiting[split] = [], 0

    def finish(self, tokenizer_name: str | None = None) -> None:
        """Writes what is pending and meta.json. Raises UserError if a split has no documents."""
        for split, parts in self.pending.items():
            if parts:
                self._flush(split)
        if self.splits.keys() != {'train', 'val'}:
            raise UserError(f"{self.folder} would have the splits {sorted(self.splits)}: expected documents for "
                            "'train' and for 'val'")
        write_json(self.folder / 'meta.json', {
            'tokenizer': tokenizer_name or self.tokenizer.name,
            'n_ids': self.tokenizer.n_ids, 'eos_id': self.tokenizer.eos_id,
            'dtype': 'uint16' if self.dtype.itemsize == 2 else 'uint32', 'splits': self.splits})


def write_data(folder, tokenizer, documents, shard_tokens: int = 100_000_000) -> None:
    """Builds a data folder from documents, an iterable of (split, text), the splits being 'train' and 'val'.

    All or nothing: it appears under its name when it is whole. Raises UserError if the folder exists or a split stays
    empty.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f'{folder} exists: remove it first, or write to another folder')
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent))
    try:
        writer = ShardWriter(temporary, tokenizer, shard_tokens)
        for split, text in documents:
            writer.add(split, tokenizer.encode(text) + [tokenizer.eos_id], len(text.encode()))
        writer.finish()
        os.replace(temporary, folder)
    except UserError as error:
        raise UserError(str(error).replace(str(temporary), str(folder)))
    except OSError as error:
        if not folder.exists():  # where it does, another process has built it meanwhile
            raise UserError(f'{folder} could not be written: {error}')
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def split_of(text: str, val_share: float = VAL_SHARE) -> str:
    """'train' or 'val' by a hash of a document's text or id, so that equal documents are never in both."""
    hashed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64
    return 'val' if hashed < val_share else 'train'


def text_documents(paths: list[Path]) -> Iterator[str]:
    """Yields the texts of files in pieces that end at a line's end."""
    size = min(PIECE, sum(path.stat().st_size for path in paths) // 100)
    for path in paths:
        piece = ''
        for line in path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True):
            piece += line
            if len(piece) >= size:
                yield piece
                piece = ''
        if piece.strip():
            yield piece


# ---- reading ----


class Data:
    """A data folder, checked: meta.json complete, every shard there and of its size. Raises UserError otherwise."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / 'meta.json').is_file():
            raise UserError(f'no data at {folder}: expected a folder with meta.json')
        try:
            meta = json.loads((self.folder / 'meta.json').read_text())
            self.tokenizer, self.n_ids, self.eos_id = meta['tokenizer'], meta['n_ids'], meta['eos_id']
            if self.tokenizer not in ('byte', 'gpt2'):  # a file or folder beside meta.json
                self.tokenizer = str((self.folder / self.tokenizer).resolve())
            self.splits, dtype = meta['splits'], {'uint16': '<u2', 'uint32': '<u4'}[meta['dtype']]
            shards = {}
            for split in ('train', 'val'):
                shards[split] = [(self.folder / s['file'], s['tokens']) for s in self.splits[split]['shards']]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{self.folder}/meta.json is damaged ({type(error).__name__}: {error}); build the data '
                            'again')
        self.shards, self.starts = {}, {}
        for split, files in shards.items():
            for path, tokens in files:
                have = path.stat().st_size if path.is_file() else None
                want = tokens * np.dtype(dtype).itemsize
                if have != want:
                    state = 'is missing' if have is None else f'has {have} bytes'
                    raise UserError(f'{path} {state}, meta.json says {want}; copy or build the data again')
            self.shards[split] = [np.memmap(path, dtype, 'r') for path, _ in files]
            self.starts[split] = np.cumsum([0] + [tokens for _, tokens in files])

    @property
    def sha256(self) -> str:
        """One checksum for all shards, by which a resumed run knows its data."""
        return hashlib.sha256(json.dumps(self.splits, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Reads every shard and compares its sha256 with meta.json."""
        for split in self.shards.values():
            for shard in split:
                path = Path(shard.filename)
                recorded = {s['file']: s['sha256'] for info in self.splits.values() for s in info['shards']}
                if hashlib.sha256(shard).hexdigest() != recorded[path.name]:
                    raise UserError(f'{path} does not match its checksum in meta.json; copy or build the data again')

    def tokens(self, split: str, start: int, count: int) -> np.ndarray:
        """count token ids of a split from position start, across shards, int64 (count,)."""
        parts, starts = [], self.starts[split]
        while count > 0:
            shard = int(np.searchsorted(starts, start, 'right')) - 1
            part = self.shards[split][shard][start - starts[shard]:][:count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.n_ids:
            raise UserError(f'{self.folder} holds id {ids.max()}, but its tokenizer has only {self.n_ids} ids; '
                            'build the data again')
        return ids

    def n_windows(self, split: str, T: int) -> int:
        """Windows of T inputs and their T targets in a split. A training epoch starts at any of T offsets."""
        total = int(self.starts[split][-1])
        return total // T - 1 if split == 'train' else (total - 1) // T

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """idx, targets (part of batch_size, T) int64 of a training step: a pure function of its arguments.

        Every epoch reads all its windows once, in an order of its own and cut at an offset of its own.
        """
        n = self.n_windows('train', T)
        windows = []
        for i in range(step * batch_size, (step + 1) * batch_size)[part]:
            index, offset = shuffled(i, n, seed)
            windows.append(self.tokens('train', index * T + offset % T, T + 1))
        windows = torch.from_numpy(np.stack(windows))
        return windows[:, :-1], windows[:, 1:]

    def val_batch(self, windows, T: int) -> tuple:
        """idx, targets (len(windows), T) int64 of these validation windows, cut one after the other from the start."""
        windows = torch.from_numpy(np.stack([self.tokens('val', w * T, T + 1) for w in windows]))
        return windows[:, :-1], windows[:, 1:]

    def example(self, T: int, new_tokens: int) -> tuple[list[int], int]:
        """A prompt to continue, the start of the validation set, and how many ids of new_tokens then fit into T."""
        new_tokens = min(new_tokens, T // 2)
        return self.tokens('val', 0, min(32, T - new_tokens)).tolist(), new_tokens


# ---- the order of training ----


def shuffled(i: int, n: int, seed: int) -> tuple[int, int]:
    """Which of n windows the i-th of training is, and a number of that epoch's own.

    Every epoch takes each window once, in its own order.
    """
    epoch, index = divmod(i, n)
    *keys, own = epoch_keys(seed, epoch)
    return permute(index, n, keys), own


@functools.lru_cache(8)
def epoch_keys(seed: int, epoch: int) -> list[int]:
    """Five pseudo-random 64-bit numbers of an epoch."""
    return [int.from_bytes(hashlib.sha256(f'{seed} {epoch} {j}'.encode()).digest()[:8], 'little') for j in range(5)]


def permute(i: int, n: int, keys: list[int]) -> int:
    """Where a pseudo-random permutation of range(n) puts i, without holding it.

    A Feistel network on the next power of 4, applied again while it lands outside range(n) (cycle walking).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for key in keys:
            mixed = (right + key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i
