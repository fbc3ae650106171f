"""Token data: tokenizers, the shard format, and the order in which training reads it.

A data folder holds shards of token ids, little-endian and nothing else, and meta.json, which says all about them:

    {"tokenizer": "byte", "n_ids": 257, "eos_id": 256, "dtype": "uint16",
     "splits": {"train": {"tokens": ..., "documents": ..., "bytes": ..., "shards": [{"file", "tokens", "sha256"}]}, "val": ...}}

Every document is followed by one eos. Built-in data is one file each in this folder, with a function build(folder). A folder of
.txt files is data too: on first use it is built into such a folder, as bytes, in pieces of some thousand characters.

Synthetic tasks are built-in data that is never written: `Generated` makes each row when it is read. Such a file has a dataclass Task,
whose fields are the options of its name, as in 'path_star:degree=2,length=5', and which has

    symbols                     the text of each token id; the id after the last one is eos, which no row contains
    row_tokens                  tokens of a row, T + 1: a row is T inputs and, one further, their T targets
    train_rows, val_rows        rows of the fixed training set, None for fresh rows without end; rows held out
    row(rng)                    a row's ids, (T + 1,), a function of numpy's generator alone
    counted(idx)                (B, T) bool: the positions whose targets count; all other targets are -1
    score(model, idx, targets, device, batch_size)   {name: exact score} on held-out rows (n, T)
"""
import difflib
import functools
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import tempfile
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

BUILT = Path(__file__).resolve().parent / 'built'  # where built-in data and text folders go; ignored by git
VAL_SHARE = 0.05  # of the documents of built-in data and of text folders
PIECE = 10_000  # bytes of the documents that .txt files are cut into, about; less where there is little text


class UserError(ValueError):
    """Bad input, told in a sentence to a person: what was given, what was expected, what to do."""


# ---- files ----

def sync_folder(folder):
    """Makes renames in a folder last through a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, value):
    """Writes JSON so that the file is old or new, never half of either."""
    write_file(path, json.dumps(value, indent=1).encode())


def write_file(path, content):
    """Writes bytes so that the file is old or new, never half of either. Raises OSError that names the file."""
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.writing')
    try:
        with open(temporary, 'wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path))
    sync_folder(path.parent)


# ---- tokenizers ----

@dataclass
class Tokenizer:
    """encode(text) -> list of ids; decode(ids) -> bytes, so that a character cut between two tokens is the caller's to join."""

    name: str
    n_ids: int  # ids 0 ... n_ids - 1, eos included
    eos_id: int
    encode: object
    decode: object
    encode_array: object = None  # encode as a numpy array, where that is faster; the text must have no half surrogate pairs


GPT2_SHA256 = {'encoder.json': '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783',
               'vocab.bpe': '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5'}
EOS_NAMES = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '[EOS]')


def load_tokenizer(name):
    """The tokenizer called `name`: 'byte' (256 bytes and eos), 'gpt2' (through tiktoken, which downloads it once), or a path.

    A path is a Hugging Face tokenizer.json, a SentencePiece .model, or a folder with GPT-2's encoder.json and vocab.bpe. The name
    of a synthetic task, with its options, is that of its symbols' tokenizer.
    Raises UserError if it is not there, is damaged, or names no end of a document.
    """
    name, path = str(name), Path(name)
    if name == 'byte':
        return Tokenizer('byte', 257, 256, lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256))
    if name == 'gpt2':
        import tiktoken
        try:
            return gpt2_tokenizer(name, tiktoken.get_encoding('gpt2'))
        except OSError as error:
            raise UserError(f'the gpt2 tokenizer is not on this machine and could not be downloaded ({type(error).__name__}): set '
                            'TIKTOKEN_CACHE_DIR to a folder that has it, or give --vocab_dir, a folder with encoder.json and vocab.bpe')
    if task_class(name):
        return symbol_tokenizer(name, make_task(name).symbols)
    if not path.exists():
        raise UserError(f"unknown tokenizer {name!r}: expected 'byte', 'gpt2', or the path of a tokenizer.json, a SentencePiece .model or a "
                        'folder with encoder.json and vocab.bpe')
    if path.is_dir():
        return gpt2_tokenizer(name, gpt2_encoding(path))
    return sentencepiece_tokenizer(path) if path.suffix == '.model' else huggingface_tokenizer(path)


def symbol_tokenizer(name, symbols):
    """A token for each symbol: a word or a single other character. Blanks and commas only separate; decoding puts a blank before each."""
    id_of = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text):
        found = re.findall(r'\w+|[^\w\s,]', text)
        for symbol in found:
            if symbol not in id_of:
                near = difflib.get_close_matches(symbol, symbols, 3, 0.4) or [symbols[0], '...', symbols[-1]]
                raise UserError(f'{symbol!r} is no symbol of {name}: expected {" ".join(near)}')
        return [id_of[symbol] for symbol in found]
    return Tokenizer(name, len(symbols) + 1, len(symbols), encode, lambda ids: ''.join(' ' + symbols[i] for i in ids if i < len(symbols)).encode())


def gpt2_tokenizer(name, bpe):
    return Tokenizer(name, 50257, 50256, bpe.encode_ordinary, bpe.decode_bytes, lambda text: bpe.encode_to_numpy(text, disallowed_special=()))


def gpt2_encoding(folder):
    """tiktoken's gpt2 from encoder.json and vocab.bpe in a folder, if they are the very files that it downloads."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    for file, want in GPT2_SHA256.items():
        if not (folder / file).is_file() or hashlib.sha256((folder / file).read_bytes()).hexdigest() != want:
            raise UserError(f'{folder / file} is {"not the one of GPT-2" if (folder / file).is_file() else "missing"}: expected the file that '
                            f'OpenAI published, sha256 {want}')
    cache, os.environ['TIKTOKEN_CACHE_DIR'] = os.environ.get('TIKTOKEN_CACHE_DIR'), ''  # local files need no copies
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(str(folder / 'vocab.bpe'), str(folder / 'encoder.json'))
    finally:
        del os.environ['TIKTOKEN_CACHE_DIR']
        if cache is not None:
            os.environ['TIKTOKEN_CACHE_DIR'] = cache
    return tiktoken.Encoding('gpt2', pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={'<|endoftext|>': 50256},
                             explicit_n_vocab=50257)


def huggingface_tokenizer(path):
    from tokenizers import Tokenizer as Fast
    from tokenizers.pre_tokenizers import ByteLevel
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{path} is not a tokenizer.json: {error}')
    eos = next((fast.token_to_id(token) for token in EOS_NAMES if fast.token_to_id(token) is not None), None)
    if eos is None:
        raise UserError(f'{path} has no token that ends a document: expected one of {", ".join(EOS_NAMES)}')
    fast.no_truncation()
    n_ids = max(fast.get_vocab().values()) + 1
    of_character = None
    if 'ByteLevel' in json.dumps(json.loads(path.read_text(encoding='utf-8'))['decoder']):  # GPT-2's printable character for each byte
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        of_character = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        assert of_character.keys() == set(ByteLevel.alphabet())
    piece = lambda i: piece_bytes(fast.id_to_token(i) or '', of_character)
    return Tokenizer(str(path), n_ids, eos, lambda text: fast.encode(text, add_special_tokens=False).ids,
                     lambda ids: b''.join(piece(i) for i in ids if i != eos))


def sentencepiece_tokenizer(path):
    import sentencepiece
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f'{path} is not a SentencePiece model: {error}')
    if model.eos_id() < 0:
        raise UserError(f'{path} has no end-of-document piece (eos): train the SentencePiece model with one')
    return Tokenizer(str(path), model.vocab_size(), model.eos_id(), model.encode,
                     lambda ids: b''.join(b'' if model.is_control(i) else piece_bytes(model.id_to_piece(i)) for i in ids))


def piece_bytes(piece, of_character=None):
    """The bytes of a token: GPT-2's characters for bytes, or SentencePiece's: <0x41> a byte, U+2581 a space."""
    if of_character:
        return bytes(of_character[c] for c in piece) if all(c in of_character for c in piece) else piece.encode()
    return bytes([int(piece[3:5], 16)]) if re.fullmatch('<0x[0-9A-F]{2}>', piece) else piece.replace('\u2581', ' ').encode()


def padded_vocab(n_ids):
    """Rows of the embedding table: the next multiple of 64 above n_ids, so that at least one padding row is free for <predict>."""
    return (n_ids // 64 + 1) * 64


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

    def add(self, split, ids, n_bytes):
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

    def finish(self, tokenizer_name=None):
        """Writes what is pending and meta.json. Raises UserError if a split has no documents."""
        for split, parts in self.pending.items():
            if parts:
                self._flush(split)
        if self.splits.keys() != {'train', 'val'}:
            raise UserError(f"{self.folder} would have the splits {sorted(self.splits)}: expected documents for 'train' and for 'val'")
        write_json(self.folder / 'meta.json', {
            'tokenizer': tokenizer_name or self.tokenizer.name, 'n_ids': self.tokenizer.n_ids, 'eos_id': self.tokenizer.eos_id,
            'dtype': 'uint16' if self.dtype.itemsize == 2 else 'uint32', 'splits': self.splits})


def write_data(folder, tokenizer, documents, shard_tokens=100_000_000):
    """Builds a data folder from documents, an iterable of (split, text), the splits being 'train' and 'val'.

    All or nothing: it appears under its name when it is whole. Raises UserError if the folder exists or a split stays empty.
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


def split_of(text, val_share=VAL_SHARE):
    """'train' or 'val' by a hash of a document's text or id, so that equal documents are never in both."""
    hashed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64
    return 'val' if hashed < val_share else 'train'


def text_documents(paths):
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

def open_data(name):
    """Data by name, by data folder, or by a folder of .txt files. What is not built yet is built, which takes seconds."""
    folder, build = Path(name), None
    if task_class(name):
        return Generated(str(name))
    if name in builtin_data():
        folder, build = BUILT / name, importlib.import_module(f'data.{name}').build
    elif not (folder / 'meta.json').exists() and (paths := sorted(p for p in folder.rglob('*.txt') if p.is_file())):
        files = [(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
        folder = BUILT / f'{folder.resolve().name}-{hashlib.sha256(json.dumps([files, PIECE, VAL_SHARE]).encode()).hexdigest()[:12]}'
        build = lambda folder: write_data(folder, load_tokenizer('byte'), ((split_of(text), text) for text in text_documents(paths)))
    if build and not folder.exists():
        print(f'building {folder} ...', flush=True)
        build(folder)
    return Data(folder)


def builtin_data():
    return sorted(p.stem for p in Path(__file__).parent.glob('[a-z]*.py'))


def task_class(name):
    """The Task class of the synthetic task that a data name begins with, or None."""
    kind = str(name).partition(':')[0]
    return getattr(importlib.import_module(f'data.{kind}'), 'Task', None) if kind in builtin_data() else None


def make_task(name):
    """The Task of a data name 'task' or 'task:option=value,...'; UserError for an option or a value that it does not take."""
    from config import Text, typed  # here, because config imports this file
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


class Data:
    """A data folder, checked: meta.json complete, every shard there and of its size. Raises UserError otherwise."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / 'meta.json').is_file():
            raise UserError(f'no data at {folder}: expected a folder with meta.json or with .txt files, '
                        f'or built-in data ({", ".join(builtin_data())})')
        try:
            meta = json.loads((self.folder / 'meta.json').read_text())
            self.tokenizer, self.n_ids, self.eos_id = meta['tokenizer'], meta['n_ids'], meta['eos_id']
            if self.tokenizer not in ('byte', 'gpt2'):  # a file or folder beside meta.json
                self.tokenizer = str((self.folder / self.tokenizer).resolve())
            self.splits, dtype = meta['splits'], {'uint16': '<u2', 'uint32': '<u4'}[meta['dtype']]
            shards = {split: [(self.folder / s['file'], s['tokens']) for s in self.splits[split]['shards']] for split in ('train', 'val')}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{self.folder}/meta.json is damaged ({type(error).__name__}: {error}); build the data again')
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
    def sha256(self):
        """One checksum for all shards, by which a resumed run knows its data."""
        return hashlib.sha256(json.dumps(self.splits, sort_keys=True).encode()).hexdigest()

    def verify(self):
        """Reads every shard and compares its sha256 with meta.json."""
        for split in self.shards.values():
            for shard in split:
                path = Path(shard.filename)
                recorded = {s['file']: s['sha256'] for info in self.splits.values() for s in info['shards']}
                if hashlib.sha256(shard).hexdigest() != recorded[path.name]:
                    raise UserError(f'{path} does not match its checksum in meta.json; copy or build the data again')

    def tokens(self, split, start, count):
        """count token ids of a split from position start, across shards, as an int64 array."""
        parts, starts = [], self.starts[split]
        while count > 0:
            shard = int(np.searchsorted(starts, start, 'right')) - 1
            part = self.shards[split][shard][start - starts[shard]:][:count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.n_ids:
            raise UserError(f'{self.folder} holds id {ids.max()}, but its tokenizer has only {self.n_ids} ids; build the data again')
        return ids

    def n_windows(self, split, T):
        """Windows of T inputs and their T targets in a split; a training epoch starts its windows at any of T offsets."""
        total = int(self.starts[split][-1])
        return total // T - 1 if split == 'train' else (total - 1) // T

    def train_batch(self, step, batch_size, T, seed, rows=slice(None)):
        """idx, targets (rows of batch_size, T) int64 of a training step: a pure function of its arguments.

        Every epoch reads all its windows once, in an order of its own and cut at an offset of its own.
        """
        n = self.n_windows('train', T)
        windows = []
        for i in range(step * batch_size, (step + 1) * batch_size)[rows]:
            index, offset = shuffled(i, n, seed)
            windows.append(self.tokens('train', index * T + offset % T, T + 1))
        windows = torch.from_numpy(np.stack(windows))
        return windows[:, :-1], windows[:, 1:]

    def val_batch(self, windows, T):
        """idx, targets (len(windows), T) int64 of the given validation windows, cut one after the other from the start."""
        windows = torch.from_numpy(np.stack([self.tokens('val', w * T, T + 1) for w in windows]))
        return windows[:, :-1], windows[:, 1:]

    def example(self, T, new_tokens):
        """A prompt to continue, the start of the validation set, and how many ids of new_tokens then fit into T."""
        new_tokens = min(new_tokens, T // 2)
        return self.tokens('val', 0, min(32, T - new_tokens)).tolist(), new_tokens


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
def likeliest(model, idx, device, batch_size):
    """The token that the model holds likeliest after each position. idx (n, T) -> (n, T) int64, on the CPU."""
    return torch.cat([model.logits(part.to(device)).argmax(-1).cpu() for part in idx.split(batch_size)])


def shuffled(i, n, seed):
    """Which of n windows the i-th of training is, and a number of that epoch's own: every epoch takes each once, in its own order."""
    epoch, index = divmod(i, n)
    *keys, own = epoch_keys(seed, epoch)
    return permute(index, n, keys), own


@functools.lru_cache(8)
def epoch_keys(seed, epoch):
    """Five pseudo-random 64-bit numbers of an epoch."""
    return [int.from_bytes(hashlib.sha256(f'{seed} {epoch} {j}'.encode()).digest()[:8], 'little') for j in range(5)]


def permute(i, n, keys):
    """Where a pseudo-random permutation of range(n) puts i, without holding it: a Feistel network on the next power of 4,
    applied again while it lands outside range(n) (cycle walking)."""
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
