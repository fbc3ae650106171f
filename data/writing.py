"""Writing data folders: `write_data`, the class ShardWriter that it uses, and the ids of documents, however long."""
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from common.files import UserError, sha256, write_json
from data.tokenizers import Tokenizer, keep_tokenizer

PIECE = 2 ** 17  # characters of a document that are encoded at a time: a library may need 170 bytes for each
CONTEXT = 1009  # characters before a cut by which it is judged; a prime, so that nothing repeats as often
WORD_END = re.compile(r'(?<=\S)(?=\s)|(?<=\S)\b')  # not after blanks: what a blank is part of depends on what follows


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
        if path.is_file() and path.stat().st_size > size:
            os.truncate(path, size)
        if not path.is_file() or sha256(path) != shard['sha256']:
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


def dtype_of(tokenizer: Tokenizer) -> str:
    return 'uint16' if tokenizer.n_ids <= 2 ** 16 else 'uint32'


# ---- documents ----

def document_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the ids of a document with its eos, and with bos if the tokenizer was loaded with it."""
    pieces = encoded_pieces(tokenizer.encode_document, text)
    parts = chain([tokenizer.start], pieces, [[tokenizer.eos_id]])
    return np.concatenate([np.asarray(ids, dtype_of(tokenizer)) for ids in parts])


def encoded_pieces(encode: Callable, text: str) -> Iterator:
    """Yield the ids of a text in pieces: together they are those of the whole, which may need too much memory."""
    start, n_before = 0, 0
    while start < len(text):
        end = next_cut(encode, text, start)
        yield encode(text[max(0, start - CONTEXT):end])[n_before:]  # without those of the context
        start, n_before = end, len(encode(text[end - CONTEXT:end]))


def next_cut(encode: Callable, text: str, start: int) -> int:
    """Return where the piece from `start` on ends: where no token and no rule for tokens reaches across.

    The characters before such a place have the same ids with and without those behind it. If there is no such place,
    for example in a word of a million letters, the piece is longer.
    """
    for word_end in WORD_END.finditer(text, start + PIECE):
        cut = word_end.start()
        alone, continued = (list(encode(text[cut - CONTEXT:end])) for end in (cut, cut + CONTEXT))
        if continued[:len(alone)] == alone:
            return cut
    return len(text)
