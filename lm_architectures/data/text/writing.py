"""Write data folders: read `write_data` first. `split_of` chooses the split of a document."""
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lm_architectures.data.text.tokenizers import Tokenizer, copy_tokenizer
from lm_architectures.files import UserError, sha256, write_json

VAL_FRACTION = 0.05  # of built-in data, and of texts that train.py reads
PIECE = 2 ** 17  # characters encoded at a time; a library may need 170 bytes of memory for each
CONTEXT = 1009  # characters on each side of a cut to test it; a prime, unlikely to be the period of a text
WORD_END = re.compile(r'(?<=\S)(?=\s)|(?<=\S)\b')  # not after spaces: their tokens depend on what follows


class ShardWriter:
    """Write the shards of a data folder: `add` documents, then `finish`. Documents are not split.

    splits: {split: {'tokens', 'documents', 'bytes', 'shards'}}, which is updated. If it is that of
    an interrupted writer's last `flush`, its shards are checked, and writing continues after them.
    """

    def __init__(self, folder, tokenizer, shard_tokens, splits=None):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype = 'uint16' if tokenizer.n_ids <= 2 ** 16 else 'uint32'
        self.splits = {} if splits is None else splits
        self.files = {}  # {split: open file of its current shard}
        for split, shard in [(split, shard) for split, info in self.splits.items() for shard in info['shards']]:
            path, size = self.folder / shard['file'], shard['tokens'] * np.dtype(self.dtype).itemsize
            if path.is_file() and path.stat().st_size > size:  # written after the last flush
                os.truncate(path, size)
            if not path.is_file() or sha256(path) != shard['sha256']:
                raise UserError(f'{path} is missing or does not match its checksum in progress.json: remove '
                                f'{self.folder} and start again')
            if shard['tokens'] < self.shard_tokens:
                self.files[split] = open(path, 'ab')

    @property
    def n_tokens(self) -> int:
        return sum(info['tokens'] for info in self.splits.values())

    def add(self, split: str, ids, n_bytes: int) -> bool:
        """Add a document of n_bytes of text (ids include eos). Returns True if it fills a shard."""
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
        if is_full := shard['tokens'] >= self.shard_tokens:
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
        """Complete the data folder. UserError if a split has no text."""
        self.flush()
        for file in self.files.values():
            file.close()
        n_bytes = [self.splits.get(split, {'bytes': 0})['bytes'] for split in ('train', 'val')]
        if 0 in n_bytes:
            raise UserError(f'the train split would have {n_bytes[0]:,} bytes of text, val {n_bytes[1]:,}: give more '
                            'text (or prepare_fineweb.py a larger --max_tokens), so that neither is empty')
        write_json(self.folder / 'meta.json', {
            'tokenizer': copy_tokenizer(self.folder, self.tokenizer.name), 'n_ids': self.tokenizer.n_ids,
            'eos_id': self.tokenizer.eos_id, 'bos': bool(self.tokenizer.start), 'dtype': self.dtype,
            'splits': self.splits})


def write_data(folder, tokenizer, documents, shard_tokens: int = 100_000_000) -> None:
    """Build a data folder, which must not exist, from (split, text). It appears once complete."""
    temporary = Path(folder).with_name(f'.{Path(folder).name}.writing')
    temporary.mkdir(parents=True)
    try:
        writer = ShardWriter(temporary, tokenizer, shard_tokens)
        for split, text in documents:
            writer.add(split, document_ids(tokenizer, text), len(text.encode()))
        writer.finish()
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- documents ----

def hash_fraction(text: str, val_hash: str) -> float:
    """Return a text's hash as a fraction of 2^64 (first 8 bytes); md5 as in official SPS code."""
    if val_hash == 'md5':
        return int.from_bytes(hashlib.md5(f'42:{text}'.encode()).digest()[:8], 'little') / 2 ** 64
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64


def split_of(text: str, val_fraction: float = VAL_FRACTION, val_hash: str = 'sha256') -> str:
    """Return 'train' or 'val' by a hash of a document's text or id: duplicates share a split."""
    return 'val' if hash_fraction(text, val_hash) < val_fraction else 'train'


def document_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the ids of a document with eos, and bos if the tokenizer was loaded with it."""
    pieces = encoded_pieces(tokenizer.encode_plain or tokenizer.encode, text)
    return np.concatenate([np.asarray(ids, np.uint32) for ids in (tokenizer.start, *pieces, [tokenizer.eos_id])])


def encoded_pieces(encode: Callable, text: str) -> Iterator:
    """Yield the ids of a text in pieces, equal to those of the whole text but with less memory."""
    start, n_before = 0, 0
    while len(text) - start > PIECE:
        end = next_cut(encode, text, start)
        yield encode(text[max(0, start - CONTEXT):end])[n_before:]  # without the context's ids
        start, n_before = end, len(encode(text[end - CONTEXT:end]))
    yield encode(text[max(0, start - CONTEXT):])[n_before:]


def next_cut(encode: Callable, text: str, start: int) -> int:
    """Return the end of the piece that begins at `start`: the next place that no token crosses.

    The ids before such a place do not depend on the text after it.
    """
    for word_end in WORD_END.finditer(text, start + PIECE):
        cut = word_end.start()
        alone, continued = (list(encode(text[cut - CONTEXT:end])) for end in (cut, cut + CONTEXT))
        if continued[:len(alone)] == alone:
            return cut
    return len(text)
