"""Read documents from local files or, through the library `datasets`, from any dataset.

In order of reading: a `Source` is a list of parts, each with a reader. `local_files` and
`open_dataset` find them, and each format has one reader. `document` makes a record a document.
docs/data.md lists the formats.
"""
import csv
import glob
import gzip
import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from lm_architectures.files import UserError, warn_once, without_surrogates

FORMATS = {'.jsonl': 'json', '.ndjson': 'json', '.json': 'json', '.parquet': 'parquet', '.csv': 'csv', '.txt': 'txt',
           '.arrow': 'datasets'}
RECORDS = 'json', 'csv', 'parquet', 'datasets'
ONLY_FOR = {'config': ('datasets',), 'split': ('datasets',), 'text_field': RECORDS, 'id_field': RECORDS,
            'split_lines': ('txt',), 'split_at': ('txt',)}  # all other options are for any format
BYTE_ORDER_MARK = b'\xef\xbb\xbf'
BLANK = BYTE_ORDER_MARK + b' \t\r\n'
CHUNK = 2 ** 16  # characters of a .txt file that are read at a time
BATCH = 250  # rows of a file that are in memory at a time
SHUFFLE_SEED = 2357  # official SPS code


@dataclass
class Reading:
    config: str | None = None  # dataset configuration; None: the only one. FineWeb-Edu: sample-350BT
    split: str = 'train'  # dataset split to read; train and val are both taken from it
    text_field: str = 'text'  # record field with the document's text
    id_field: str | None = 'id'  # record field hashed to pick train or val; None, .txt or records without id: the text
    split_lines: bool = False  # treat each line of a .txt file as a document, not the whole file
    split_at: str | None = None  # text that separates documents in a .txt file, such as <|endoftext|>; may span lines
    val_fraction: float = 0.001  # of the documents, for validation; raised if that is too few. FineWeb-Edu: 0.0005
    val_hash: Literal['sha256', 'md5'] = 'sha256'  # hash of the id that chooses train or val. FineWeb-Edu: md5
    shuffle: int = 0  # documents per shuffle block (files are shuffled too); 0: no shuffling. FineWeb-Edu: 200,000


class Source:
    """The documents of a file, folder or pattern, or of a dataset.

    Its parts are files: (name, 'line', 'row' or 'document', reader). checksum covers names, sizes
    and times of local files, or the revision of a dataset. UserError if there is no such source or
    no text.
    """

    def __init__(self, name: str, s: Reading):
        self.name, self.s, files = name, s, local_files(name, s)
        self.format = format_of(files[0]) if files else 'datasets'
        if files:
            unit, reader = READERS[self.format]
            self.parts, self.checksum = [(file, unit, partial(reader, file, s)) for file in files], checksum_of(files)
        else:
            self.parts, self.checksum = open_dataset(name, s)
        if s.shuffle:
            random.Random(SHUFFLE_SEED).shuffle(self.parts)

    def documents(self, state: list | None = None) -> Iterator[tuple]:
        """Yield (next state, `document` of a record), from a state or from the start."""
        return self._shuffled(state) if self.s.shuffle else self._in_order(state)

    def _in_order(self, state: list | None) -> Iterator[tuple]:
        """Read part after part. A state is [number of a part, its records read]."""
        first, n_read = state or [0, 0]
        has_text = state is not None
        for i, (part, unit, read) in enumerate(self.parts[first:], first):
            n = 0
            try:
                unit = 'item' if unit == 'line' and is_json_list(part) else unit
                for n, record in read():
                    if i == first and n <= n_read:
                        continue
                    found = document(f'{part}, {unit} {n:,}', record, self.s)
                    has_text = has_text or found is not None
                    yield [i, n], found
            except Exception as error:
                raise named_error(f'{part} cannot be read after {n:,} {unit}s', error)
        if not has_text:
            record = next((record for *_, read in self.parts for _, record in read()), None)
            raise UserError(f'{self.name} has no text' + (
                f' in field {self.s.text_field!r}; fields: {", ".join([*record][:20])}. Set --text_field of '
                'prepare_fineweb.py or lm_architectures.data.text.train_tokenizer' if record else ''))

    def _shuffled(self, state: list | None) -> Iterator[tuple]:
        """Shuffle blocks of documents. A state is [start of a block, its number, what was read]."""
        begin, block, n_read = state or [None, 0, 0]
        in_order = self._in_order(begin)
        while found := [*islice(in_order, self.s.shuffle)]:
            end = found[-1][0]
            random.Random(f'{SHUFFLE_SEED} {block}').shuffle(found)
            for n in range(n_read, len(found)):
                yield [begin, block, n + 1], found[n][1]
            begin, block, n_read = end, block + 1, 0


# ---- which files ----

def local_files(name: str, s: Reading) -> list[str]:
    """Return the files, of one format, of a path, pattern or folder; [] to read it with `datasets`.

    Ignores unknown formats, and .txt files next to records (such as a license).
    """
    if os.path.isdir(name):
        matches = visible_files(name)
        if s.config or 'datasets' in map(format_of, matches):
            return []  # a copy of a dataset on the hub, or saved with `datasets`
    else:
        matches = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not (matches or glob.has_magic(name) or format_of(name)):
            return []  # a dataset on the hub
    if not matches:
        raise UserError(f'no file matches {name}')
    found = [file for file in matches if format_of(file)]
    files = [file for file in found if format_of(file) != 'txt'] or found
    formats = {format_of(file) for file in files}
    if len(formats) != 1 or 'datasets' in formats:
        raise UserError(f'{name} matches {", ".join(matches[:3])}{" ..." if matches[3:] else ""}: expected files of '
                        'one format: .jsonl or .json, .csv, .txt (each also with .gz or .zst), or .parquet. Rename '
                        'other plain text to .txt')
    return files


def check_options(source: Source) -> None:
    """Raise UserError for an option that this format or another option would leave unused."""
    for option, formats in ONLY_FOR.items():
        value = getattr(source.s, option)
        if source.format not in formats and value not in (None, getattr(Reading, option)):
            raise UserError(f'{option} is {value!r}, but {source.name} is read as {source.format}: {option} is for '
                            + ', '.join(formats))
    if source.s.split_lines and source.s.split_at:
        raise UserError('split_lines and split_at exclude each other: give one of them')


def format_of(file: str) -> str | None:
    return FORMATS.get(Path(file.lower().removesuffix('.gz').removesuffix('.zst')).suffix)


def visible_files(folder: str) -> list[str]:
    """Return all files in a folder, recursively, sorted. Hidden files and folders are ignored."""
    found = [path for path in Path(folder).rglob('*') if path.is_file()]
    return sorted(str(path) for path in found if not any(part[0] == '.' for part in path.relative_to(folder).parts))


def checksum_of(files: list[str]) -> str:
    identity = [(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def open_dataset(name: str, s: Reading) -> tuple[list, str]:
    """Return the parts and the checksum of a dataset, read with the library `datasets`."""
    import datasets
    try:
        if os.path.isfile(f'{name}/state.json') or os.path.isfile(f'{name}/dataset_dict.json'):  # from `save_to_disk`
            saved = datasets.load_from_disk(name)
            if s.config:
                raise UserError(f'config is {s.config!r}, but {name} is from `save_to_disk`: leave out config')
            saved = (saved if isinstance(saved, datasets.DatasetDict) else {'train': saved})[s.split]
            stream, checksum = saved.with_format(None).to_iterable_dataset(), checksum_of(visible_files(name))
        else:
            builder = datasets.load_dataset_builder(name, s.config)
            identity = [builder.hash]
            for split, files in (builder.config.data_files or {}).items():
                identity.append((str(split), *files, files.origin_metadata))  # revision on the hub, or file time
            checksum = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
            stream = builder.as_streaming_dataset(split=s.split)
            if stream.features and hasattr(builder.config, 'columns'):  # parquet: others may differ between files
                builder.config.columns = fields_to_read(name, [*stream.features], s)
                stream = builder.as_streaming_dataset(split=s.split)
    except Exception as error:  # for example: no such dataset or split, no network, a damaged file
        raise named_error(f'{name} could not be opened', error)
    return [(f'{name}, part {i + 1}', 'row', partial(dataset_records, name, s, stream, i))
            for i in range(stream.num_shards)], checksum


def named_error(what: str, error: Exception) -> UserError:
    """Say what failed, for the errors of a library, which have no common class."""
    if isinstance(error, UserError):
        return error
    hint = ': expected UTF-8, convert it with iconv' if isinstance(error, UnicodeError) else ''
    return UserError(f'{what} ({type(error).__name__}): {error}{hint}')


# ---- a reader for each format: yields (number of its last line or row, record) from the start ----

def json_records(file: str, s: Reading) -> Iterator[tuple]:
    """Read a record per line, per item of a list, or from { alone to } with the same indent."""
    with open_bytes(file) as lines:
        if is_json_list(file):
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


def is_json_list(file: str) -> bool:
    with open_bytes(file) as lines:
        return '.json' in Path(file.lower()).suffixes and lines.peek(64).lstrip(BLANK).startswith(b'[')


def csv_records(file: str, s: Reading) -> Iterator[tuple]:
    """Read a record per row. Empty cells are missing values; NA is text."""
    csv.field_size_limit(sys.maxsize)
    with open_text(file, newline='') as lines:
        rows = filter(None, csv.reader(lines, strict=True))  # strict: an error for a quote that is never closed
        header = next(rows, [])
        fields = fields_to_read(file, header, s)
        for n, row in enumerate(rows, 1):
            if len(row) != len(header):  # a comma without quotes would cut the text
                raise ValueError(f'row {n:,} has {len(row)} cells, the header {len(header)}: put texts in quotes')
            yield n, {field: cell or None for field, cell in zip(header, row) if field in fields}


def text_records(file: str, s: Reading) -> Iterator[tuple]:
    """Read a record per file, or per line or part between markers."""
    with open_text(file) as lines:
        marker = '\n' if s.split_lines else (s.split_at or '').replace('\r\n', '\n')  # as in the text that is read
        parts = split_at_marker(iter(partial(lines.read, CHUNK), ''), marker) if marker else [lines.read()]
        for n, part in enumerate(parts, 1):
            for marker in ('<|endoftext|>', '</s>'):  # of other tools
                if marker in part:
                    warn_once(f'a text contains {marker}, which is read as ordinary text. To split documents there, '
                              f"use prepare_fineweb.py --split_at='{marker}'")
            if part.strip():
                yield n, {s.id_field: None, s.text_field: part}


def split_at_marker(chunks: Iterable[str], marker: str) -> Iterator[str]:
    """Yield the texts between markers, without surrounding newlines, from a text in chunks."""
    held, end = [], ''  # of the text since the last marker; end: where a marker may begin
    for chunk in chunks:
        *texts, end = (end + chunk).split(marker)
        for text in texts:
            yield ''.join([*held, text]).strip('\n')
            held = []
        cut = max(0, len(end) - len(marker) + 1)
        held.append(end[:cut])
        end = end[cut:]
    yield ''.join([*held, end]).strip('\n')


def parquet_records(file: str, s: Reading) -> Iterator[tuple]:
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(file) as parquet:
        batches = parquet.iter_batches(BATCH, columns=fields_to_read(file, parquet.schema_arrow.names, s))
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)


def dataset_records(name: str, s: Reading, stream, i: int) -> Iterator[tuple]:
    """Read shard i of a dataset of the library `datasets`."""
    tables = stream.shard(stream.num_shards, i).with_format('arrow').iter(BATCH)
    found = (table.select(fields_to_read(name, table.column_names, s)) for table in tables)
    yield from enumerate((record for table in found for record in table.to_pylist()), 1)


READERS = {'json': ('line', json_records), 'csv': ('row', csv_records), 'txt': ('document', text_records),
           'parquet': ('row', parquet_records)}


def open_bytes(file: str) -> io.BufferedIOBase:
    """Open a file, compressed or not."""
    if file.lower().endswith('.zst'):
        import pyarrow
        return io.BufferedReader(pyarrow.input_stream(file))
    return gzip.open(file) if file.lower().endswith('.gz') else open(file, 'rb')


def open_text(file: str, newline: str | None = None) -> io.TextIOWrapper:
    """Open a file in UTF-8, compressed or not, with or without a byte order mark."""
    return io.TextIOWrapper(open_bytes(file), encoding='utf-8-sig', newline=newline)


# ---- documents ----

def document(place: str, record, s: Reading) -> tuple[str, str] | None:
    """Return (id or else text, text), or None without a text. UserError for other types."""
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
    return without_surrogates(text if key is None else str(key)), without_surrogates(text)


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
