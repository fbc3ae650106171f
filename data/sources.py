"""Read documents from local files or, through the library `datasets`, any dataset.

Start with `open_source`. docs/data.md lists the formats; each has one reader here. train.py --data
reads .txt files in the same way.
"""
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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from common.files import UserError, warn_once

FORMATS = {'.jsonl': 'json', '.ndjson': 'json', '.json': 'json', '.parquet': 'parquet', '.csv': 'csv', '.txt': 'txt',
           '.arrow': 'datasets'}
EXPECTED = 'expected files of one format: .jsonl or .json, .csv, .txt (each also with .gz or .zst), or .parquet'
MARKERS = ('<|endoftext|>', '</s>')  # end-of-text markers that may occur in .txt files
VAL_SHARE = 0.05  # validation fraction of built-in data and texts
BATCH = 250  # records per batch
BATCH_CHARACTERS = 2 ** 22  # a batch ends after this many characters
TAIL = 0.1  # fraction of a single text that becomes validation data, as in nanoGPT
MIN_VAL_DOCUMENTS = 10  # minimum number of validation documents; below 200 documents, 5% of them
SHUFFLE_SEED = 2357  # official SPS code
TEXTS = SimpleNamespace(  # settings `s` of the functions below for train.py --data
    config=None, split='train', text_field='text', id_field=None, split_lines=False, split_at=None, val_share=VAL_SHARE,
    val_hash='sha256', shuffle=0)

# ---- which files ----

def format_of(file: str) -> str | None:
    return FORMATS.get(Path(file.lower().removesuffix('.gz').removesuffix('.zst')).suffix)


def visible_files(folder: str) -> list[str]:
    """Return all files in a folder, recursively, sorted. Hidden files and folders are ignored."""
    found = [path for path in Path(folder).rglob('*') if path.is_file()]
    return sorted(str(path) for path in found if not any(part[0] == '.' for part in path.relative_to(folder).parts))


def files_of_config(folder: str, s) -> list[str]:
    """Return the files that README.md lists for a configuration and split of a dataset's folder."""
    import datasets
    try:
        return [*datasets.load_dataset_builder(folder, s.config).config.data_files[s.split]]
    except Exception as error:  # no such configuration or split
        raise UserError(f'{folder} could not be opened ({type(error).__name__}): {error}')


def local_files(name: str, s) -> list[str]:
    """Return the files, of one format, of a path, pattern or folder; [] to read it with `datasets`.

    Ignores unknown formats, and .txt files next to records (such as a license).
    """
    if os.path.isdir(name):
        matches = files_of_config(name, s) if s.config else visible_files(name)
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


# ---- reading them ----

def open_source(name: str, s) -> tuple[Callable, str]:
    """Return (read, checksum of the source). s: see prepare_fineweb.Settings.

    read(state) yields (next state, [document]) in batches, from the start if state is None, else
    from a next state, which is JSON. A document is (split, key, text), or None for a record without
    text. If split is None, the hash of key (id or text) chooses train or val. The checksum covers
    names, sizes and times of local files, or the revision of a dataset on the hub.
    """
    files = local_files(name, s)
    if files:
        checksum = checksum_of_files(files)
        if s.shuffle:
            random.Random(SHUFFLE_SEED).shuffle(files)
        read = partial(file_batches, files, s)
    else:
        stream, checksum = open_dataset(name, s)
        read = partial(stream_batches, name, stream, s)
    read = partial(document_batches, name, read, s)
    return (partial(shuffled_batches, read, s.shuffle) if s.shuffle else read), checksum


def checksum_of_files(files: list[str]) -> str:
    identity = [(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def open_dataset(name: str, s) -> tuple:
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
    except UserError:
        raise
    except Exception as error:  # for example: no such dataset or split, no network, a damaged file
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')


def stream_batches(name: str, stream, s, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, [(place, record, split)]) from a datasets.IterableDataset."""
    stream, n_read = stream.with_format('arrow'), 0
    if state:
        n_read = state['records']
        stream.load_state_dict(state['stream'])
    try:
        for table in stream.iter(BATCH):
            records = table.select(fields_to_read(name, table.column_names, s)).to_pylist()
            found = [(f'{name}, record {n:,}', record, None) for n, record in enumerate(records, n_read + 1)]
            n_read += len(records)
            yield {'records': n_read, 'stream': stream.state_dict()}, found
    except UserError:
        raise
    except Exception as error:  # errors depend on the format; or text is not UTF-8
        raise UserError(f'{name} cannot be read after record {n_read:,} ({type(error).__name__}): {error}')


def file_batches(files: list[str], s, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, [(place, record, split)]) of local files: BATCH records, fewer if long."""
    batch, size = [], 0
    for next_state, *found in file_records(files, s, state or {'file': 0, 'line': 0}):
        batch.append(found)
        size += len(str(found[1].get(s.text_field))) if isinstance(found[1], dict) else 0
        if len(batch) == BATCH or size >= BATCH_CHARACTERS:
            yield next_state, batch
            batch, size = [], 0
    if batch:
        yield next_state, batch


def file_records(files: list[str], s, state: dict) -> Iterator[tuple]:
    """Yield (next state, place, record, split) from a state on: file number, lines or rows read."""
    read = {'json': json_records, 'parquet': partial(parquet_records, s), 'csv': partial(csv_records, s),
            'txt': partial(text_records, s, len(files))}
    for i in range(state['file'], len(files)):
        file, n = files[i], state['line'] if i == state['file'] else 0  # n: lines or rows read
        unit = 'row' if format_of(file) in ('parquet', 'csv') else 'line'
        try:
            for found in islice(read[format_of(file)](file), n, None):
                n += 1
                if found:
                    yield {'file': i, 'line': n}, f'{file}, {unit} {n:,}', *found
        except UserError:
            raise
        except Exception as error:  # each format raises its own errors
            raise UserError(f'{file} cannot be read after {n:,} {unit}s ({type(error).__name__}): {error}')


def fields_to_read(place: str, names: list[str], s) -> list[str]:
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


def open_compressed(file: str) -> io.BufferedIOBase:
    """Open a file, compressed or not, for reading bytes."""
    if not file.lower().endswith('.zst'):
        return gzip.open(file) if file.lower().endswith('.gz') else open(file, 'rb')
    import pyarrow
    return io.BufferedReader(pyarrow.input_stream(file))


def json_records(file: str) -> Iterator[tuple | None]:
    """Yield (record, None) per line, or per list item of a .json file; None for other lines.

    A record may take several lines: from { alone to } with the same indentation.
    """
    with open_compressed(file) as lines:
        blank = b'\xef\xbb\xbf \t\r\n'  # first a byte order mark, which json.loads decodes
        if '.json' in Path(file.lower()).suffixes and lines.peek(64).lstrip(blank).startswith(b'['):
            yield from ((record, None) for record in json.load(lines))
        for line in lines:
            part = [line]
            if line.strip(blank) == b'{':
                end = line.lstrip(b'\xef\xbb\xbf').partition(b'{')[0] + b'}'
                while part[-1] and (part[-1] is line or not part[-1].startswith(end)):
                    part.append(lines.readline())
            record = json.loads(b''.join(part)) if line.strip() else None
            yield from [None] * (len(part) - 1)
            yield (record, None) if line.strip() else None


def parquet_records(s, file: str) -> Iterator[tuple]:
    """Yield (record, None) per row."""
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(BATCH, columns=fields_to_read(file, parquet.schema_arrow.names, s)):
            for record in batch.to_pylist():
                yield record, None


def csv_records(s, file: str) -> Iterator[tuple]:
    """Yield (record, None) per row. Empty cells are missing values; NA is text."""
    csv.field_size_limit(sys.maxsize)
    with open_compressed(file) as raw, io.TextIOWrapper(raw, encoding='utf-8-sig', newline='') as lines:
        rows = csv.DictReader(lines, strict=True)  # an error for a quote that is never closed
        fields = fields_to_read(file, [*(rows.fieldnames or [])], s)
        for row in rows:
            yield {field: row[field] or None for field in fields}, None


def text_records(s, n_files: int, file: str) -> Iterator[tuple | None]:
    """Yield (record, split) per .txt file or line, or two parts of a single file; None if empty."""
    with open_compressed(file) as raw, io.TextIOWrapper(raw, encoding='utf-8-sig') as lines:
        if s.split_lines or s.split_at:
            parts = ((part, None) for part in split_at_marker(lines, s.split_at or '\n'))
        else:
            text = lines.read()
            cut = int(len(text) * (1 - TAIL))
            parts = [(text, None)] if n_files > 1 else [(text[:cut], 'train'), (text[cut:], 'val')]
        for part, split in parts:
            for marker in MARKERS:
                if marker in part:
                    warn_once(f'a text contains {marker}, which is read as ordinary text. To split documents there, '
                             f"use prepare_fineweb.py --split_at='{marker}'")
            yield ({s.id_field: None, s.text_field: part}, split) if part.strip() else None


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


def shuffled_batches(read: Callable, n: int, state: dict | None) -> Iterator[tuple]:
    """Shuffle the documents of `read`, in blocks of n, rounded up to whole batches.

    A block is read whole and shuffled with its number as seed, so the state is the start of the
    block and the number of its documents read.
    """
    state = state or {'source': None, 'block': 0, 'read': 0}
    begin, block, n_read = state['source'], state['block'], state['read']
    batches = read(begin)
    while True:
        found, end = [], begin
        for end, batch in islice(batches, math.ceil(n / BATCH)):  # noqa: B007
            found += batch
        if not found:
            return
        random.Random(f'{SHUFFLE_SEED} {block}').shuffle(found)
        for start in range(n_read, len(found), BATCH):
            stop = start + BATCH
            next_state = {'source': begin, 'block': block, 'read': stop}
            if stop >= len(found):
                next_state = {'source': end, 'block': block + 1, 'read': 0}
            yield next_state, found[start:stop]
        begin, block, n_read = end, block + 1, 0


# ---- documents ----

def document_batches(name: str, read: Callable, s, state: dict | None) -> Iterator[tuple]:
    """Convert batches of records to (next state, [document]). UserError if no record has text."""
    has_text, fields = state is not None, []
    for next_state, records in read(state):
        found = [document(*record, s) for record in records]
        has_text, fields = has_text or any(found), fields or [*records[0][1]]
        yield next_state, found
    if not has_text:
        raise UserError(f'{name} has no text in field {s.text_field!r}; fields: '
                        f'{", ".join(fields[:20]) or "none"}. Set --text_field of prepare_fineweb.py')


def document(place: str, record, split: str | None, s) -> tuple | None:
    """Return (split, key, text) of a record, None if it has no text. UserError for other types."""
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
    # replace lone surrogates, which UTF-8 cannot encode, with question marks
    text = text.encode(errors='replace').decode()
    return split, text if key is None else str(key).encode(errors='replace').decode(), text


def split_of(text: str, val_share: float = VAL_SHARE, val_hash: str = 'sha256') -> str:
    """Return 'train' or 'val' by a hash of a document's text or id: duplicates share a split."""
    return 'val' if hash_share(text, val_hash) < val_share else 'train'


def hash_share(text: str, val_hash: str) -> float:
    """Return a text's hash as a fraction of 2^64 (first 8 bytes); md5 as in official SPS code."""
    if val_hash == 'md5':
        return int.from_bytes(hashlib.md5(f'42:{text}'.encode()).digest()[:8], 'little') / 2 ** 64
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64


def with_splits(batches: Iterator[tuple], val_share: float, by_text: bool, val_hash: str) -> Iterator[tuple]:
    """Yield (next state, [(split, text) or None]). by_text: split by the text, not by the key."""
    for state, batch in batches:
        yield state, [found and (found[0] or split_of(found[2 if by_text else 1], val_share, val_hash), found[2])
                      for found in batch]


def fitting_share(read: Callable, s, max_tokens: int | None = None, by_text: bool = False) -> tuple[float, bool]:
    """Return (val_share, by_text) for `with_splits`, and print changes from the settings.

    Raises val_share to leave MIN_VAL_DOCUMENTS for validation (5% of fewer than 200 documents).
    by_text: True if all documents have one id. Stops reading after enough documents or max_tokens
    bytes, because a document rarely has more tokens than bytes.
    """
    shares, n_val, n_bytes = [], 0, 0
    for split, key, text in (found for _, batch in read(None) for found in batch if found):
        if split:
            print(f'single text: its last {TAIL:.0%} are the validation data', flush=True)
            return s.val_share, False
        shares.append(hash_share(text if by_text else key, s.val_hash))
        n_val += shares[-1] < s.val_share
        n_bytes += len(text.encode()) + 1
        if (n_val >= MIN_VAL_DOCUMENTS and shares[-1] != shares[0]) or (max_tokens and n_bytes >= max_tokens):
            break
    n, n_ids = len(shares), len(set(shares))
    if n_ids < n and not by_text and key != text:
        print(f'repeated ids: {n:,} documents have {n_ids:,} in field {s.id_field!r}; '
              + ('documents with the same id are in the same split (--id_field=None: split by text)' if n_ids > 1 else
                 'splitting by text instead'), flush=True)
        if n_ids == 1:
            return fitting_share(read, s, max_tokens, by_text=True)
    enough = min(MIN_VAL_DOCUMENTS, max(1, n // 20))
    if n_val >= enough:
        return s.val_share, by_text
    val_share = math.nextafter(sorted(shares)[enough - 1], 1)
    print(f'val_share = {s.val_share:g} leaves {n_val} of {n:,} documents for validation: raised to '
          f'{val_share:.2g}, which leaves {sum(share < val_share for share in shares):,}', flush=True)
    return val_share, by_text