"""The shard format: writing it, reading it, and the order in which training reads it.

A data folder holds shards of token ids, little-endian and nothing else, and meta.json, which says all about them:

     {"tokenizer": "byte", "n_ids": 257, "eos_id": 256, "bos": false, "dtype": "uint16", "splits": {"train": {"tokens":
     ..., "documents": ..., "bytes": ..., "shards": [{"file", "tokens", "sha256"}]}, "val": ...}, "crc32": of the rest}

Every document is followed by one eos; with "bos" each starts with the tokenizer's bos, too. Beside each shard, as
train_00000.bin, a file train_00000.crc32 has the crc32 of every MiB of it, and at its end that of these numbers:
uint32, little-endian. A MiB is checked when it is first read.
"""
import bisect
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import weakref
import zlib
from pathlib import Path

import numpy as np
import torch

from common.files import UserError, read_json, say_once, sha256, write_file, write_json

BUILT = Path(__file__).resolve().parent / 'built'  # where built-in data and text folders go; ignored by git
VAL_SHARE = 0.05  # of the documents of built-in data and of texts
MIB = 2 ** 20
DTYPES = {'uint16': np.dtype('<u2'), 'uint32': np.dtype('<u4')}
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model', 'gpt2_vocabulary')  # in data and run folders; the last a folder
KEPT_OPEN = 400  # files of a data folder; a process may have 1,024 open, as systems are delivered


# ---- checksums ----

def piece_checksums(content) -> bytes:
    """The .crc32 file of a shard with this content, bytes or an array."""
    content = memoryview(content).cast('B')
    pieces = [zlib.crc32(content[begin:begin + MIB]) for begin in range(0, len(content), MIB)]
    numbers = np.array(pieces, '<u4').tobytes()
    return numbers + zlib.crc32(numbers).to_bytes(4, 'little')


def read_checksums(path: Path, size: int) -> np.ndarray | None:
    """The checksums of the MiBs of a shard of `size` bytes, from its .crc32 file; None if there is none, as of old."""
    if not path.exists():
        return None
    content = path.read_bytes()
    numbers, own = content[:-4], content[-4:]
    if len(numbers) != 4 * math.ceil(size / MIB) or zlib.crc32(numbers).to_bytes(4, 'little') != own:
        raise UserError(f'{path} is damaged; copy it again, or remove it and let train.py --verify check the shard')
    return np.frombuffer(numbers, '<u4')


# ---- writing ----


class ShardWriter:
    """Writes the shards of a data folder: `add` documents, then `finish`. A shard ends with the document that fills it.

    splits {split: {'tokens', 'documents', 'bytes', 'shards'}} and pending {split: ids} continue an earlier writer.
    """

    def __init__(self, folder, tokenizer, shard_tokens, splits=None, pending=None):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype_name = 'uint16' if tokenizer.n_ids <= 2 ** 16 else 'uint32'
        self.dtype = DTYPES[self.dtype_name]
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
        write_file((self.folder / name).with_suffix('.crc32'), piece_checksums(tokens))
        shards.append({'file': name, 'tokens': len(tokens), 'sha256': hashlib.sha256(tokens).hexdigest()})
        self.pending[split], self.waiting[split] = [], 0

    def finish(self) -> None:
        """Writes what is pending, a copy of the tokenizer's file and meta.json.

        Raises UserError if a split has no documents, or none but empty ones.
        """
        self.flush()
        check_not_empty(self.folder, self.splits)
        write_json(self.folder / 'meta.json', self.meta())

    def flush(self) -> None:
        """Writes what is pending."""
        for split, parts in self.pending.items():
            if parts:
                self._flush(split)

    def meta(self) -> dict:
        """What meta.json says. Puts a copy of the tokenizer's file into the folder."""
        return {'tokenizer': keep_tokenizer(self.folder, self.tokenizer.name),
                'n_ids': self.tokenizer.n_ids, 'eos_id': self.tokenizer.eos_id,
                'bos': bool(self.tokenizer.start), 'dtype': self.dtype_name, 'splits': self.splits}


def check_not_empty(folder, splits: dict) -> None:
    """Raises UserError if the splits of a data folder have no text to train on or to validate on."""
    n_bytes = {split: splits.get(split, {'bytes': 0})['bytes'] for split in ('train', 'val')}
    if 0 in n_bytes.values():
        raise UserError(f'{folder} would have {n_bytes["train"]:,} bytes of text in its split train and '
                        f"{n_bytes['val']:,} in val: expected documents for 'train' and for 'val'; give more text, "
                        'or a larger --max_tokens if that ended the reading')


def keep_tokenizer(folder, name: str) -> str:
    """Copies a tokenizer given by path into a folder, one of TOKENIZER_FILES; returns what meta.json calls it.

    A name that is no path stays as it is.
    """
    path, folder = Path(name), Path(folder)
    is_gpt2 = (path / 'encoder.json').is_file()  # another folder is none: ./a5 may be a run, a5 is a task's symbols
    if name in ('gpt2', 'byte') or not (is_gpt2 or path.is_file()):
        return name
    if is_gpt2:
        own_name = 'gpt2_vocabulary'
        copies = {path / file: folder / own_name / file for file in ('encoder.json', 'vocab.bpe')}
    else:
        own_name = 'tokenizer.model' if path.suffix == '.model' else 'tokenizer.json'
        copies = {path: folder / own_name}
    for source, target in copies.items():
        target.parent.mkdir(exist_ok=True)
        write_file(target, source.read_bytes())
    return own_name


def write_data(folder, tokenizer, documents, shard_tokens: int = 100_000_000) -> None:
    """Builds a data folder from documents, an iterable of (split, text), the splits being 'train' and 'val'.

    All or nothing: it appears under its name when it is whole. Raises UserError if the folder exists or a split stays
    empty.
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
    except UserError as error:
        raise UserError(str(error).replace(str(temporary), str(folder)))
    except OSError as error:
        if not folder.exists():  # where it does, another process has built it meanwhile
            raise UserError(f'{folder} could not be written: {error}')
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def document_ids(tokenizer, text: str) -> np.ndarray:
    """The ids of a document, eos included, and bos where the tokenizer was loaded with it."""
    dtype = np.uint16 if tokenizer.n_ids <= 2 ** 16 else np.uint32
    encode = tokenizer.encode_document or tokenizer.encode
    return np.concatenate([np.asarray(ids, dtype) for ids in (tokenizer.start, encode(text), [tokenizer.eos_id])])


def split_of(text: str, val_share: float = VAL_SHARE, val_hash: str = 'sha256') -> str:
    """'train' or 'val' by a hash of a document's text or id: what has the same one is never in both."""
    return 'val' if hash_share(text, val_hash) < val_share else 'train'


def hash_share(text: str, val_hash: str) -> float:
    """A number in [0, 1] by a hash of a text: its first 8 bytes as an integer, over 2^64.

    sha256: of the text, big-endian. md5: of '42:' and the text, little-endian, as in the official SPS code.
    """
    if val_hash == 'md5':
        return int.from_bytes(hashlib.md5(f'42:{text}'.encode()).digest()[:8], 'little') / 2 ** 64
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64


# ---- reading ----


def check_meta(meta: dict, is_part: bool = False) -> None:
    """Raises ValueError for a value that no meta.json has. A file name with a folder in it could leave the data's.

    is_part: a part of a preparation may lack a split, or have empty documents alone in it (parts.py).
    """
    tokenizer, n_ids, eos_id, splits = (meta.get(name) for name in ('tokenizer', 'n_ids', 'eos_id', 'splits'))
    is_path = isinstance(tokenizer, str) and os.path.isabs(tokenizer)  # `write_data` of old did not copy the file
    expect(is_plain_name(tokenizer) or is_path, 'tokenizer', tokenizer)
    expect(is_count(n_ids) and n_ids <= 2 ** 32, 'n_ids', n_ids)
    expect(is_count(eos_id, least=0) and eos_id < n_ids, 'eos_id', eos_id)
    expect(type(meta.get('bos', False)) is bool, 'bos', meta.get('bos'))  # older code did not write it
    expect(meta.get('dtype') in [*DTYPES], 'dtype', meta.get('dtype'))
    names = [*splits] if is_part and isinstance(splits, dict) else ['train', 'val']
    for name in names:
        split = splits.get(name) if isinstance(splits, dict) else None
        check_split(name, split)
        expect(is_part or split['bytes'] > 0, f'bytes of {name}', 0)
        tokens = sum(shard['tokens'] for shard in split['shards'])
        expect(tokens == split['tokens'], f'tokens of {name}', f'{split["tokens"]}, as its shards have {tokens}')


def check_split(name: str, split) -> None:
    """Raises ValueError for a value that no split of a data folder has, whole or in preparation."""
    expect(isinstance(split, dict), f'split {name}', split)
    for key, least in (('tokens', 1), ('documents', 1), ('bytes', 0)):
        expect(is_count(split.get(key), least), f'{key} of {name}', split.get(key))
    expect(isinstance(split.get('shards'), list), f'shards of {name}', split.get('shards'))
    for shard in split['shards']:
        check_shard(name, shard)


def check_shard(name: str, shard) -> None:
    """Raises ValueError for what is no record of a shard of the split `name`."""
    expect(isinstance(shard, dict), f'a shard of {name}', shard)
    expect(is_plain_name(shard.get('file')), f'the file of a shard of {name}', shard.get('file'))
    expect(is_count(shard.get('tokens')), f'tokens of {shard["file"]}', shard.get('tokens'))
    is_sha256 = isinstance(shard.get('sha256'), str) and re.fullmatch('[0-9a-f]{64}', shard['sha256'])
    expect(is_sha256, f'sha256 of {shard["file"]}', shard.get('sha256'))


def expect(is_right, name: str, value) -> None:
    if not is_right:
        raise ValueError(f'{name} cannot be {value!r:.100}')


def is_count(value, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2 ** 63


def is_plain_name(value) -> bool:
    """Whether it names a file of this folder, and none elsewhere."""
    is_one = isinstance(value, str) and value.isprintable() and value == Path(value).name and value not in ('', '..')
    return is_one and len(value) < 100


class Shard:
    """The ids of a shard, read from its file where they are wanted. Raises UserError if it has not the size it should.

    Reading raises UserError if a MiB, first read, does not have its checksum, or if the file was shortened since. (From
    a map of the file that would be a SIGBUS.)
    """

    def __init__(self, path: Path, tokens: int, dtype: np.dtype, stays_open: bool):
        self.path, self.dtype, self.size = path, dtype, tokens * dtype.itemsize
        self.stays_open = stays_open and hasattr(os, 'pread')  # a position is shared on Windows, which has no pread
        self.fd = None
        have = path.stat().st_size if path.is_file() else None
        if have != self.size:
            state = 'is missing' if have is None else f'has {have} bytes'
            raise UserError(f'{path} {state}, meta.json says {self.size}; copy or build the data again')
        self.checksums = read_checksums(path.with_suffix('.crc32'), self.size)
        self.is_checked = bytearray(math.ceil(self.size / MIB))

    def ids(self, start: int, count: int) -> np.ndarray:
        """count ids from the start-th on, all of them in this shard."""
        begin, end = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        if self.checksums is not None:
            for piece in range(begin // MIB, (end - 1) // MIB + 1):
                if not self.is_checked[piece]:
                    self._check(piece)
        return np.frombuffer(self._read(begin, end), self.dtype)

    def _check(self, piece):
        begin, end = piece * MIB, min((piece + 1) * MIB, self.size)
        if zlib.crc32(self._read(begin, end)) != self.checksums[piece]:
            checksums = self.path.with_suffix('.crc32').name
            raise UserError(f'{self.path} is damaged between byte {begin} and byte {end}, where it does not match its '
                            f'checksum in {checksums}; copy or build the data again')
        self.is_checked[piece] = 1

    def _read(self, begin, end):
        """Bytes of the file. The position is in each call, so that threads and forked processes may share the file."""
        fd = self.fd
        if fd is None:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, 'O_BINARY', 0))
            if self.stays_open:
                self.fd = fd
                weakref.finalize(self, os.close, fd)
        try:
            content = read_at(fd, end - begin, begin)
            while len(content) < end - begin:  # one call reads 2 GiB at most
                more = read_at(fd, end - begin - len(content), begin + len(content))
                if not more:
                    raise UserError(f'{self.path} has {os.fstat(fd).st_size} bytes and had {self.size}: it was '
                                    'shortened meanwhile; copy or build the data again')
                content += more
        except OSError as error:
            raise UserError(f'{self.path} cannot be read after byte {begin}: {error.strerror}')
        finally:
            if not self.stays_open:
                os.close(fd)
        return content


def read_at(fd: int, count: int, position: int) -> bytes:
    """os.pread, which Windows has not."""
    if hasattr(os, 'pread'):
        return os.pread(fd, count, position)
    os.lseek(fd, position, os.SEEK_SET)
    return os.read(fd, count)


class Data:
    """A data folder, checked: meta.json complete, every shard there and of its size. Raises UserError otherwise."""

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / 'meta.json'
        if not path.is_file():
            raise UserError(f'no data at {folder}: expected a folder with meta.json')
        meta = read_json(path, 'copy or build the data again', check_meta)
        self.tokenizer, self.n_ids, self.eos_id = meta['tokenizer'], meta['n_ids'], meta['eos_id']
        self.bos = meta.get('bos', False)  # whether documents start with bos
        if self.tokenizer not in ('byte', 'gpt2'):  # a file or folder beside meta.json
            self.tokenizer = str((self.folder / self.tokenizer).resolve())
        self.splits, dtype = meta['splits'], DTYPES[meta['dtype']]
        self.shards, self.starts, numbers = {}, {}, itertools.count()
        for split in ('train', 'val'):
            records = self.splits[split]['shards']
            self.shards[split] = [Shard(self.folder / record['file'], record['tokens'], dtype,
                                        stays_open=next(numbers) < KEPT_OPEN) for record in records]
            self.starts[split] = [0, *itertools.accumulate(record['tokens'] for record in records)]
        unchecked = sum(shard.checksums is None for split in self.shards.values() for shard in split)
        if unchecked:
            say_once(f'{folder}: {unchecked} shards have no checksums of their pieces (.crc32): only sizes are '
                     'checked; train.py --verify reads them all')

    @property
    def sha256(self) -> str:
        """One checksum for all shards, by which a resumed run knows its data."""
        return hashlib.sha256(json.dumps(self.splits, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Reads every shard and compares its sha256 with meta.json."""
        for split, shards in self.shards.items():
            for shard, record in zip(shards, self.splits[split]['shards']):
                if sha256(shard.path) != record['sha256']:
                    raise UserError(f'{shard.path} does not match its checksum in meta.json; copy or build the data '
                                    'again')

    def tokens(self, split: str, start: int, count: int) -> np.ndarray:
        """count token ids of a split from position start, across shards, int64 (count,)."""
        parts, starts = [], self.starts[split]
        while count > 0:
            i = bisect.bisect(starts, start) - 1
            part = self.shards[split][i].ids(start - starts[i], min(count, starts[i + 1] - start))
            parts.append(part)
            start, count = start + len(part), count - len(part)
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.n_ids:
            raise UserError(f'{self.folder} holds id {ids.max()}, but its tokenizer has only {self.n_ids} ids; '
                            'build the data again')
        return ids

    def n_windows(self, split: str, T: int) -> int:
        """Windows of T inputs and their T targets in a split. A training epoch starts at any of T offsets."""
        total = self.starts[split][-1]
        return total // T - 1 if split == 'train' else (total - 1) // T

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """idx, targets (part of batch_size, T) int64 of a training step: a pure function of its arguments.

        Every epoch reads all its windows once, in an order of its own and cut at an offset of its own.
        """
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)[part]
        windows, own = shuffled(numbers, self.n_windows('train', T), seed)
        starts = windows * T + (own % T).astype(np.int64)
        windows = torch.from_numpy(np.stack([self.tokens('train', start, T + 1) for start in starts.tolist()]))
        return windows[:, :-1], windows[:, 1:]

    def val_batch(self, windows, T: int, seed: int | None = None) -> tuple:
        """idx, targets (len(windows), T) int64 of the validation windows with these numbers.

        They are cut one after the other from the start. With a seed, window i is at a random offset, a function of seed
        and i alone: drawn with replacement, windows may overlap.
        """
        starts = [w * T for w in windows]
        if seed is not None:
            n_starts = self.starts['val'][-1] - T
            starts = [int(np.random.default_rng([seed, w]).integers(n_starts)) for w in windows]
        windows = torch.from_numpy(np.stack([self.tokens('val', start, T + 1) for start in starts]))
        return windows[:, :-1], windows[:, 1:]

    def example(self, T: int, new_tokens: int) -> tuple[list[int], int]:
        """A prompt to continue, the start of the validation set, and how many ids of new_tokens then fit into T."""
        new_tokens = min(new_tokens, T // 2)
        return self.tokens('val', 0, min(32, T - new_tokens)).tolist(), new_tokens


# ---- the order of training ----


def shuffled(numbers: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of n windows those of training with these numbers are, and for each a number of its epoch's own.

    int64 and uint64, as many as there are numbers. Every epoch takes each window once, in its own order.
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
    """Five pseudo-random 64-bit numbers of an epoch."""
    return [int.from_bytes(hashlib.sha256(f'{seed} {epoch} {j}'.encode()).digest()[:8], 'little') for j in range(5)]


def permute(index: np.ndarray, n: int, keys: list[int]) -> np.ndarray:
    """Where a pseudo-random permutation of range(n) puts each index, without holding it.

    A Feistel network on the next power of 4, applied again to those that land outside range(n) (cycle walking). Sums
    and products are modulo 2^64.
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
