"""Read documents from local files or, through the library `datasets`, any dataset.

In order of reading: `Source` has the documents. `local_files` finds files, each format has one
reader, `open_dataset` leaves the rest to `datasets`. `document` makes a record a document, and at
the end a hash makes it training or validation data. docs/data.md lists the formats.
"""
import bisect
import csv
import glob
import gzip
import hashlib
import io
import json
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from lm_architectures.data.text.writing import VAL_FRACTION, hash_fraction, split_of
from lm_architectures.files import UserError, warn_once, without_surrogates

FORMATS = {'.jsonl': 'json', '.ndjson': 'json', '.json': 'json', '.parquet': 'parquet', '.csv': 'csv', '.txt': 'txt',
           '.arrow': 'datasets'}
EXPECTED = 'expected files of one format: .jsonl or .json, .csv, .txt (each also with .gz or .zst), or .parquet'
MARKERS = ('<|endoftext|>', '</s>')  # end-of-text markers that may occur in .txt files
BYTE_ORDER_MARK = b'\xef\xbb\xbf'
BLANK = BYTE_ORDER_MARK + b' \t\r\n'
BATCH = 250  # rows of a file or dataset that are in memory at a time
TAIL = 0.1  # fraction of a single text that becomes validation data, as in nanoGPT
MIN_VAL_DOCUMENTS = 10  # minimum number of validation documents; below 200 documents, 5% of them
SHUFFLE_SEED = 2357  # official SPS code


@dataclass
class Reading:
    config: str | None = None  # dataset configuration; None: the only one. FineWeb-Edu: sample-350BT
    split: str = 'train'  # dataset split to read; train and val are both taken from it
    text_field: str = 'text'  # record field with the document's text
    id_field: str | None = 'id'  # record field hashed to pick train or val; None, .txt or records without id: the text
    split_lines: bool = False  # treat each line of a .txt file as a document, not the whole file
    split_at: str | None = None  # text that separates documents in a .txt file, such as <|endoftext|>
    val_fraction: float = 0.001  # of the documents, for validation; raised if that is too few. FineWeb-Edu: 0.0005
    val_hash: Literal['sha256', 'md5'] = 'sha256'  # hash of the id that chooses train or val. FineWeb-Edu: md5
    shuffle: int = 0  # documents per shuffle block (files are shuffled too); 0: no shuffling. FineWeb-Edu: 200,000


class Document(NamedTuple):
    split: str | None  # 'train' or 'val' for the two parts of a single text; None: the hash of `key` chooses
    key: str  # the id, or the text if there is none
    text: str


class Source:
    """The documents of local files, of a folder or pattern, or of a dataset.

    checksum covers names, sizes and times of local files, or the revision of a dataset on the hub.
    UserError if there is no such source, or no record has text.
    """

    def __init__(self, name: str, s: Reading):
        self.name, self.s, self.files = name, s, local_files(name, s)
        if self.files:
            self.checksum = checksum_of_files(self.files)
            if s.shuffle:
                random.Random(SHUFFLE_SEED).shuffle(self.files)
        else:
            self.stream, self.checksum = open_dataset(name, s)

    def documents(self, state: dict | None = None) -> Iterator[tuple[dict, Document | None]]:
        """Yield (next state, document), None for a record without text.

        Continues from a next state, which is JSON, or from the start.
        """
        return self._shuffled(state) if self.s.shuffle else self._in_order(state)

    def _in_order(self, state: dict | None) -> Iterator[tuple]:
        read = file_records(self.files, self.s, state) if self.files else dataset_records(self, state)
        has_text, fields = state is not None, []
        for next_state, place, record, split in read:
            found = document(place, record, split, self.s)
            has_text, fields = has_text or found is not None, fields or [*record]
            yield next_state, found
        if not has_text:
            hint = (f' in field {self.s.text_field!r}; fields: {", ".join(fields[:20])}. Set --text_field of '
                    'prepare_fineweb.py or data.train_tokenizer') if fields else ''
            raise UserError(f'{self.name} has no text{hint}')

    def _shuffled(self, state: dict | None) -> Iterator[tuple]:
        """Read blocks of s.shuffle documents, and shuffle each with its number as seed.

        A state is the start of a block and how many of its documents were read.
        """
        state = state or {'begin': None, 'block': 0, 'read': 0}
        begin, block, n_read = state['begin'], state['block'], state['read']
        in_order = self._in_order(begin)
        while True:
            found, end = [], begin
            for end, one in islice(in_order, self.s.shuffle):  # noqa: B007
                found.append(one)
            if not found:
                return
            random.Random(f'{SHUFFLE_SEED} {block}').shuffle(found)
            for n in range(n_read, len(found)):
                yield {'begin': begin, 'block': block, 'read': n + 1}, found[n]
            begin, block, n_read = end, block + 1, 0


# ---- which files ----

def local_files(name: str, s: Reading) -> list[str]:
    """Return the files, of one format, of a path, pattern or folder; [] to read it with `datasets`.

    Ignores unknown formats, and .txt files next to records (such as a license).
    """
    if os.path.isdir(name):
        if s.config:  # a copy of a dataset of the hub
            return []
        matches = visible_files(name)
    elif os.path.isfile(name):
        matches = [name]
    else:
        matches = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not matches and not glob.has_magic(name) and not format_of(name):
            return []  # a dataset on the hub
    if not matches:
        raise UserError(f'no file matches {name}')
    found = [file for file in matches if format_of(file)]
    files = [file for file in found if format_of(file) != 'txt'] or found
    formats = {format_of(file) for file in files}
    if os.path.isdir(name) and 'datasets' in formats:
        return []
    if len(formats) != 1 or 'datasets' in formats:
        raise UserError(f'{name} matches {", ".join(matches[:3])}{" ..." if matches[3:] else ""}: {EXPECTED}')
    return files


def format_of(file: str) -> str | None:
    return FORMATS.get(Path(file.lower().removesuffix('.gz').removesuffix('.zst')).suffix)


def visible_files(folder: str) -> list[str]:
    """Return all files in a folder, recursively, sorted. Hidden files and folders are ignored."""
    found = [path for path in Path(folder).rglob('*') if path.is_file()]
    return sorted(str(path) for path in found if not any(part[0] == '.' for part in path.relative_to(folder).parts))


def checksum_of_files(files: list[str]) -> str:
    identity = [(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


# ---- records of files ----

def file_records(files: list[str], s: Reading, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, place, record, split). A state is a file's number and the lines read."""
    first, n_read = (state['file'], state['line']) if state else (0, 0)
    is_single = len(files) == 1 and format_of(files[0]) == 'txt' and not (s.split_lines or s.split_at)
    readers = {'json': json_records, 'parquet': parquet_records, 'csv': csv_records,
               'txt': partial(text_records, is_single=is_single)}
    for i, file in enumerate(files[first:], first):
        n, unit = 0, 'row' if format_of(file) in ('parquet', 'csv') else 'line'
        try:
            for n, record in readers[format_of(file)](file, s):
                if i > first or n > n_read:
                    split = ('train' if n == 1 else 'val') if is_single else None
                    yield {'file': i, 'line': n}, f'{file}, {unit} {n:,}', record, split
        except Exception as error:
            raise named_error(f'{file} cannot be read after {n:,} {unit}s', error)


# Each reader yields (number of its last line or row, record) from the start of a file.

def json_records(file: str, s: Reading) -> Iterator[tuple]:
    """Read a record per line, or per item of the list in a .json file.

    A record may take several lines: from { alone to } with the same indentation.
    """
    with open_compressed(file) as lines:
        if '.json' in Path(file.lower()).suffixes and lines.peek(64).lstrip(BLANK).startswith(b'['):
            yield from enumerate(json.load(lines), 1)
        part, end = [], b''  # the lines of a record so far, and how its last line starts
        for n, line in enumerate(lines, 1):
            part.append(line)
            if not end and line.strip(BLANK) == b'{':
                end = line.removeprefix(BYTE_ORDER_MARK).partition(b'{')[0] + b'}'
            if line.strip() and line.startswith(end):
                yield n, json.loads(b''.join(part))
                part, end = [], b''
        if b''.join(part).strip():
            json.loads(b''.join(part))  # an error: the file was cut


def parquet_records(file: str, s: Reading) -> Iterator[tuple]:
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(file) as parquet:
        batches = parquet.iter_batches(BATCH, columns=fields_to_read(file, parquet.schema_arrow.names, s))
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)


def csv_records(file: str, s: Reading) -> Iterator[tuple]:
    """Read a record per row. Empty cells are missing values; NA is text."""
    csv.field_size_limit(sys.maxsize)
    with open_text(file, newline='') as lines:
        rows = csv.DictReader(lines, strict=True)  # an error for a quote that is never closed
        fields = fields_to_read(file, [*(rows.fieldnames or [])], s)
        for n, row in enumerate(rows, 1):
            yield n, {field: row[field] or None for field in fields}


def text_records(file: str, s: Reading, is_single: bool) -> Iterator[tuple]:
    """Read a record per file, per line or part between markers, or per part of a single text."""
    with open_text(file) as lines:
        if s.split_lines or s.split_at:
            parts = split_at_marker(lines, s.split_at or '\n')
        else:
            text = lines.read()
            cut = int(len(text) * (1 - TAIL)) if is_single else len(text)
            parts = text[:cut], text[cut:]
        for n, part in enumerate(parts, 1):
            for marker in MARKERS:
                if marker in part:
                    warn_once(f'a text contains {marker}, which is read as ordinary text. To split documents there, '
                             f"use prepare_fineweb.py --split_at='{marker}'")
            if part.strip():
                yield n, {s.id_field: None, s.text_field: part}


def split_at_marker(lines: Iterable[str], marker: str) -> Iterator[str]:
    """Yield the texts between markers, without surrounding newlines. Markers do not span lines."""
    held = []
    for line in lines:
        *ends, rest = line.split(marker)
        for end in ends:
            yield ''.join([*held, end]).strip('\n')
            held = []
        held.append(rest)
    yield ''.join(held).strip('\n')


def open_compressed(file: str) -> io.BufferedIOBase:
    """Open a file, compressed or not, for reading bytes."""
    if not file.lower().endswith('.zst'):
        return gzip.open(file) if file.lower().endswith('.gz') else open(file, 'rb')
    import pyarrow
    return io.BufferedReader(pyarrow.input_stream(file))


def open_text(file: str, newline: str | None = None) -> io.TextIOWrapper:
    """Open a file, compressed or not, for reading UTF-8 without a byte order mark."""
    return io.TextIOWrapper(open_compressed(file), encoding='utf-8-sig', newline=newline)


# ---- records of datasets ----

def open_dataset(name: str, s: Reading) -> tuple:
    """Return (IterableDataset, checksum) of a dataset, read with the library `datasets`."""
    import datasets
    try:
        if os.path.isfile(f'{name}/state.json') or os.path.isfile(f'{name}/dataset_dict.json'):  # from `save_to_disk`
            saved = datasets.load_from_disk(name)
            saved = saved[s.split] if isinstance(saved, datasets.DatasetDict) else saved
            return saved.with_format(None).to_iterable_dataset(), checksum_of_files(visible_files(name))
        builder = datasets.load_dataset_builder(name, s.config)
        identity = [builder.hash]
        for split, files in (builder.config.data_files or {}).items():
            identity.append((str(split), *files, files.origin_metadata))  # revision on the hub, or file time
            if s.shuffle:
                random.Random(SHUFFLE_SEED).shuffle(files)
        checksum = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        stream = builder.as_streaming_dataset(split=s.split)
        if stream.features and hasattr(builder.config, 'columns'):  # parquet: other columns may differ between files
            builder.config.columns = fields_to_read(name, [*stream.features], s)
            stream = builder.as_streaming_dataset(split=s.split)
        return stream, checksum
    except Exception as error:  # for example: no such dataset or split, no network, a damaged file
        raise named_error(f'{name} could not be opened', error)


def dataset_records(source: Source, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, place, record, None).

    A state is that of the library before a batch, the records read of the batch, and of all.
    """
    name, stream = source.name, source.stream.with_format('arrow')
    state = state or {'stream': None, 'of_batch': 0, 'records': 0}
    before, of_batch, n = state['stream'], state['of_batch'], state['records']
    if before:
        stream.load_state_dict(before)
    try:
        for table in stream.iter(BATCH):
            records = table.select(fields_to_read(name, table.column_names, source.s)).to_pylist()
            for record in records[of_batch:]:
                of_batch, n = of_batch + 1, n + 1
                yield {'stream': before, 'of_batch': of_batch, 'records': n}, f'{name}, record {n:,}', record, None
            before, of_batch = stream.state_dict(), 0
    except Exception as error:
        raise named_error(f'{name} cannot be read after record {n:,}', error)


def named_error(what: str, error: Exception) -> UserError:
    """Say what failed, for the errors of a library, which have no common class."""
    if isinstance(error, UserError):
        return error
    hint = ': expected UTF-8, convert it with iconv' if isinstance(error, UnicodeError) else ''
    return UserError(f'{what} ({type(error).__name__}): {error}{hint}')


# ---- documents ----

def document(place: str, record, split: str | None, s: Reading) -> Document | None:
    """Return the document of a record, None if it has no text. UserError for other types."""
    if not isinstance(record, dict):
        raise UserError(f'{place} is {record!r:.60}: expected an object with fields, {{"{s.text_field}": ...}}')
    text = record.get(s.text_field)
    if text in (None, ''):
        return None
    fields_to_read(place, [*record], s)
    key = record.get(s.id_field) if s.id_field else None
    if not isinstance(text, str):
        raise UserError(f'{place} has {text!r:.60} in field {s.text_field!r}: expected text; set --text_field of '
                        'prepare_fineweb.py')
    return Document(split, without_surrogates(text if key is None else str(key)), without_surrogates(text))


def fields_to_read(place: str, names: list[str], s: Reading) -> list[str]:
    """Return the names of the text and id fields. UserError if `names` lacks one, except `id`."""
    wanted = [*dict.fromkeys(filter(None, (s.text_field, s.id_field)))]
    if s.id_field == 'id' and 'id' not in names:
        wanted.remove('id')
        warn_once("records without a field 'id': the hash of their text picks train or val; or set --id_field")
    for field in wanted:
        if field not in names:
            raise UserError(f'{place} has no field {field!r}; fields: {", ".join(names[:20])}. Set --text_field '
                            'or --id_field of prepare_fineweb.py (--id_field=None: split by the hash of the text)')
    return wanted


# ---- training and validation data ----

def texts_as_data(path: Path) -> tuple[str, Iterator] | None:
    """Return (name, documents) for a file or folder of texts, None if it has none.

    Records have their text in the field `text`. The name depends on names, sizes and mtimes.
    """
    formats = {*map(format_of, [str(path)] if path.is_file() else visible_files(str(path)))} - {None}
    if not formats or 'datasets' in formats:  # the latter: a folder of the library of this name
        return None
    source = Source(str(path), Reading(id_field=None, val_fraction=VAL_FRACTION))

    def documents():
        for _, found in split_documents(source, *fitting_split(source)):
            if found:  # a record with text
                yield found
    return f'{path.resolve().name}-{source.checksum[:12]}', documents()


def split_documents(source: Source, val_fraction: float, by_text: bool, state: dict | None = None) -> Iterator[tuple]:
    """Yield (next state, (split, text) or None). by_text: split by the text, not the id."""
    for next_state, found in source.documents(state):
        if found is None:
            yield next_state, None
        else:
            split = split_of(found.text if by_text else found.key, val_fraction, source.s.val_hash)
            yield next_state, (found.split or split, found.text)


def fitting_split(source: Source, max_tokens: int | None = None) -> tuple[float, bool]:
    """Return (val_fraction, by_text) for `split_documents`, and print changes from the settings.

    Raises val_fraction to leave MIN_VAL_DOCUMENTS for validation (5% of fewer than 200 documents).
    by_text: True if all documents have one id. Stops reading after enough documents or max_tokens
    bytes, because a document rarely has more tokens than bytes.
    """
    s, by_key, by_text, n_val, n_bytes = source.s, [], [], 0, 0  # the hashes of all keys, and of all texts
    for found in (found for _, found in source.documents() if found):
        if found.split:
            print(f'single text: its last {TAIL:.0%} are the validation data', flush=True)
            return s.val_fraction, False
        by_key.append(hash_fraction(found.key, s.val_hash))
        by_text.append(hash_fraction(found.text, s.val_hash))
        n_val += by_key[-1] < s.val_fraction
        n_bytes += len(found.text.encode()) + 1
        if (n_val >= MIN_VAL_DOCUMENTS and by_key[-1] != by_key[0]) or (max_tokens and n_bytes >= max_tokens):
            break
    n, n_ids = len(by_key), len(set(by_key))
    is_one_id = n_ids == 1 < n and by_text != by_key
    if n_ids < n and by_text != by_key:
        print(f'repeated ids: {n:,} documents have {n_ids:,} in field {s.id_field!r}; '
              + ('splitting by text instead' if is_one_id else
                 'documents with the same id are in the same split (--id_field=None: split by text)'), flush=True)
    hashes = sorted(by_text if is_one_id else by_key)
    n_val, enough = bisect.bisect_left(hashes, s.val_fraction), min(MIN_VAL_DOCUMENTS, max(1, n // 20))
    if n_val >= enough:
        return s.val_fraction, is_one_id
    val_fraction = math.nextafter(hashes[enough - 1], 1)
    print(f'val_fraction = {s.val_fraction:g} leaves {n_val} of {n:,} documents for validation: raised to '
          f'{val_fraction:.2g}, which leaves {bisect.bisect_left(hashes, val_fraction):,}', flush=True)
    return val_fraction, is_one_id
