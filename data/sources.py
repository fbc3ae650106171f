"""The documents of a source: local files, or what the library `datasets` reads. Start with `open_source`.

Each format has one reader, whether a file, a pattern or a folder names the files:

    .jsonl .json (.gz)   by `json`: a record per line; a .json file may also be one list of records
    .parquet             by pyarrow: only the text and id columns
    .txt                 one document; with `split_lines`, one per line; the only .txt of a source is cut: its last 10%
                         are the validation data. train.py --data reads texts the same way
    everything else      by `datasets`: datasets of the hub, folders with .csv, .arrow or .zst, or from `save_to_disk`
"""
import glob
import gzip
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from common.files import UserError
from data.shards import hash_share, split_of

FORMATS = {'json': ('.jsonl', '.json', '.jsonl.gz', '.json.gz'), 'parquet': ('.parquet',), 'txt': ('.txt',)}
FOR_DATASETS = ('.arrow', '.csv', '.zst')  # in a folder, for the library
EXPECTED = f'expected files of one format of {", ".join(itertools.chain(*FORMATS.values()))}'
BATCH = 250  # records read, and then encoded, at a time
TAIL = 0.1  # share of the only text that becomes validation data, as in nanoGPT
ENOUGH = 10  # validation documents; 5% of fewer than 200 documents
SHUFFLE_SEED = 2357  # official SPS code

# ---- which files ----


def format_of(file: str) -> str | None:
    if file.endswith(FOR_DATASETS):
        return 'datasets'
    return next((name for name, endings in FORMATS.items() if file.endswith(endings)), None)


def visible_files(folder: str) -> list[str]:
    """Return the files anywhere in a folder, sorted. Hidden files and folders are ignored."""
    found = [path for path in Path(folder).rglob('*') if path.is_file()]
    return sorted(str(path) for path in found if not any(part[0] == '.' for part in path.relative_to(folder).parts))


def text_files(path: str) -> list[str]:
    """Return the .txt files that a path names: itself, or those in a folder without records."""
    files = [path] if os.path.isfile(path) else visible_files(path)
    return [file for file in files if format_of(file)] if {*map(format_of, files)} <= {'txt', None} else []


def local_files(name: str, config: str | None = None) -> list[str]:
    """Return the files of one format that a path, a pattern or a folder names; [] if `datasets` is to read it.

    In a folder, .txt files beside records (a licence, say) are ignored.
    """
    if os.path.isdir(name):
        found = [file for file in visible_files(name) if format_of(file)]
        files = [file for file in found if format_of(file) != 'txt'] or found
        if config or 'datasets' in map(format_of, files):
            return []
        if not files:
            raise UserError(f'{name} has no files that can be read: {EXPECTED}')
    else:
        files = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
        if not files and (glob.has_magic(name) or format_of(name)):
            raise UserError(f'no file matches {name}')
    formats = {format_of(file) for file in files}
    if len(formats) > 1 or formats & {'datasets', None}:
        raise UserError(f'{name} matches {", ".join(files[:3])}{" ..." if files[3:] else ""}: {EXPECTED}')
    return files


# ---- reading them ----

def open_source(name: str, s) -> tuple[Callable, str]:
    """Return (read, a checksum of the source). s: as prepare_fineweb.Settings; s.shuffle shuffles.

    read(state) yields (next state, [document]) in batches. It starts at the beginning if the state is None, and a next
    state, which is JSON, continues behind its batch. A document is (split, key, text), where the hash of the key
    decides between train and val if the split is None; for a record without a text it is None. The checksum covers
    names, sizes and times of local files, and the revision of a dataset of the hub.
    """
    files = local_files(name, s.config)
    if files:
        checksum = checksum_of_files(files)
        if s.shuffle:
            random.Random(SHUFFLE_SEED).shuffle(files)
        read = partial(file_batches, files, s)
    else:
        stream, checksum = open_dataset(name, s)
        read = partial(stream_batches, name, stream, s)
    read = partial(document_batches, read, s)
    return (partial(shuffled_batches, read, s.shuffle) if s.shuffle else read), checksum


def checksum_of_files(files: list[str]) -> str:
    return checksum_of([(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files])


def checksum_of(identity: list) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def open_dataset(name: str, s) -> tuple:
    """Return (stream, checksum) of what the library `datasets` reads: an IterableDataset."""
    import datasets
    try:
        if os.path.isfile(f'{name}/state.json') or os.path.isfile(f'{name}/dataset_dict.json'):  # from `save_to_disk`
            saved = datasets.load_from_disk(name)
            saved = saved[s.split] if isinstance(saved, datasets.DatasetDict) else saved
            return saved.with_format(None).to_iterable_dataset(), checksum_of_files(visible_files(name))
        builder = datasets.load_dataset_builder(name, s.config)
        identity = [builder.hash]
        for split, files in (builder.config.data_files or {}).items():
            identity.append((str(split), *files, files.origin_metadata))  # the revision on the hub, or the time
            if s.shuffle:
                random.Random(SHUFFLE_SEED).shuffle(files)
        return builder.as_streaming_dataset(split=s.split), checksum_of(identity)
    except Exception as error:  # no such dataset, configuration or split, no network, or a damaged file
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')


def stream_batches(name: str, stream, s, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, [(place, record, split)]) of a datasets.IterableDataset."""
    stream, n_read = stream.with_format('arrow'), 0
    if state:
        n_read = state['records']
        stream.load_state_dict(state['stream'])
    tables = stream.iter(BATCH)
    while True:
        try:
            table = next(tables, None)
            if table is None:
                return
            records = table.select(fields_to_read(name, table.column_names, s)).to_pylist()
        except UserError:
            raise
        except Exception as error:  # each kind of file has its own; or text that is not UTF-8
            raise UserError(f'{name} cannot be read after record {n_read:,} ({type(error).__name__}): {error}')
        found = [(f'{name}, record {n:,}', record, None) for n, record in enumerate(records, n_read + 1)]
        n_read += len(records)
        yield {'records': n_read, 'stream': stream.state_dict()}, found


def file_batches(files: list[str], s, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, [(place, record, split)]) of local files."""
    found = file_records(files, s, state or {'file': 0, 'line': 0})
    while batch := list(islice(found, BATCH)):
        yield batch[-1][0], [record for _, *record in batch]


def file_records(files: list[str], s, state: dict) -> Iterator[tuple]:
    """Yield (next state, place, record, split) from a state on: the number of a file and of a line or record."""
    read = {'json': json_records, 'parquet': partial(parquet_records, s), 'txt': partial(text_records, s, len(files))}
    for i in range(state['file'], len(files)):
        file, n = files[i], state['line'] if i == state['file'] else 0
        unit = 'row' if format_of(file) == 'parquet' else 'line'
        try:
            for number, record, split in read[format_of(file)](file, n):
                n = number + 1
                yield {'file': i, 'line': n}, f'{file}, {unit} {n:,}', record, split
        except UserError:
            raise
        except Exception as error:  # each format has its own
            remedy = ': expected text in UTF-8' if isinstance(error, UnicodeDecodeError) else ''
            raise UserError(f'{file} cannot be read after {unit} {n:,} ({type(error).__name__}): {error}{remedy}')


def fields_to_read(place: str, names: list[str], s) -> list[str]:
    """Return the names of the text and id fields. Raises UserError if a source with fields of these names lacks one."""
    wanted = [*dict.fromkeys(filter(None, (s.text_field, s.id_field)))]
    for field in wanted:
        if field not in names:
            raise UserError(f'{place} has no field {field!r}; the fields are {", ".join(names[:20])}: set --text_field '
                            'or --id_field (--id_field=None: the hash of the text decides between train and val)')
    return wanted


def json_records(file: str, first: int) -> Iterator[tuple]:
    """Yield (number, record, None) of the lines of a file from the first-th on, or of the list that .json may be."""
    with (gzip.open if file.endswith('.gz') else open)(file, 'rb') as lines:
        begin = lines.peek(64).lstrip(b'\xef\xbb\xbf \t\r\n')
        if '.jsonl' not in Path(file).name and begin.startswith(b'['):
            for n, record in islice(enumerate(json.load(lines)), first, None):
                yield n, record, None
            return
        for n, line in enumerate(lines):
            if n >= first and line.strip():
                yield n, json.loads(line), None  # decodes a byte order mark, too


def parquet_records(s, file: str, first: int) -> Iterator[tuple]:
    """Yield (number, record, None) of the rows of a file from the first-th on."""
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(file) as parquet:
        n = 0
        for batch in parquet.iter_batches(BATCH, columns=fields_to_read(file, parquet.schema_arrow.names, s)):
            skip = max(0, first - n)
            for i, record in enumerate(batch[skip:].to_pylist(), n + skip):
                yield i, record, None
            n += len(batch)


def text_records(s, n_files: int, file: str, first: int) -> Iterator[tuple]:
    """Yield (number, record, split) of a .txt file: a document, two parts of the only one, or its lines."""
    with open(file, encoding='utf-8-sig') as lines:
        if s.split_lines:
            parts = ((line.rstrip('\n'), None) for line in lines)
        else:
            text = lines.read()
            parts = [(text, None)] if n_files > 1 else cut_text(text)
        for n, (part, split) in enumerate(parts):
            if n >= first and part.strip():
                yield n, {s.id_field: part, s.text_field: part}, split


def cut_text(text: str) -> list[tuple]:
    """Return [(part, split)] of the only text, cut at the end of a line if there is one near."""
    cut = int(len(text) * (1 - TAIL))
    cut = text.rfind('\n', int(0.9 * cut), cut) + 1 or cut
    return [(text[:cut], 'train'), (text[cut:], 'val')]


def shuffled_batches(read: Callable, n: int, state: dict | None) -> Iterator[tuple]:
    """`read` that shuffles the documents of another one, in blocks of n rounded up to whole batches.

    A block is read whole and shuffled by its number, so a state is where the block starts and how many of its documents
    have been read. (The official SPS code has a sliding buffer, one for each of its processes.)
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

def document_batches(read: Callable, s, state: dict | None) -> Iterator[tuple]:
    """Yield (next state, [document]) of batches of records. Checks the fields if the first batch has no text."""
    is_first = state is None
    for next_state, records in read(state):
        found = [document(*record, s) for record in records]
        if is_first and not any(found):
            place, record, _ = records[0]
            fields_to_read(place, [*record], s)
        yield next_state, found
        is_first = False


def document(place: str, record, split: str | None, s) -> tuple | None:
    """Return (split, key, text) of a record, or None if it has no text. Raises UserError for other types."""
    if not isinstance(record, dict):
        raise UserError(f'{place} is {record!r:.60}: expected an object with fields, {{"{s.text_field}": ...}}')
    text = record.get(s.text_field)
    if text is None:
        return None
    fields_to_read(place, [*record], s)
    key = record[s.id_field] if s.id_field else text
    if not isinstance(text, str):
        raise UserError(f'{place} has {text!r:.60} in field {s.text_field!r}, expected text: set --text_field')
    if not isinstance(key, str | int):
        raise UserError(f'{place} has {key!r:.60} in field {s.id_field!r}, expected an id: set --id_field')
    # half surrogate pairs, which UTF-8 cannot encode, become question marks
    return split, *(part.encode(errors='replace').decode() for part in (str(key), text))


def with_splits(batches: Iterator[tuple], val_share: float, val_hash: str) -> Iterator[tuple]:
    """Yield (next state, [(split, text) or None]) of batches of documents."""
    for state, batch in batches:
        yield state, [found and (found[0] or split_of(found[1], val_share, val_hash), found[2]) for found in batch]


def fitting_share(read: Callable, s, max_tokens: int | None = None) -> float:
    """Return val_share, or a larger one, which it prints, if val_share leaves too few documents for validation.

    Enough are ENOUGH documents, or 5% of fewer than 200. It reads until it has found enough, or as many bytes as
    max_tokens: a document rarely has more tokens than bytes.
    """
    shares, n_val, n_bytes = set(), 0, 0
    for split, key, text in (found for _, batch in read(None) for found in batch if found):
        if split:
            print(f'one text: its last {TAIL:.0%} are the validation data', flush=True)
            return s.val_share
        share = hash_share(key, s.val_hash)
        n_val += share < s.val_share and share not in shares
        shares.add(share)
        n_bytes += len(text.encode()) + 1
        if n_val == ENOUGH or (max_tokens and n_bytes >= max_tokens):
            break
    enough = min(ENOUGH, max(1, len(shares) // 20))
    if n_val >= enough or len(shares) < 2:
        return s.val_share
    val_share = math.nextafter(sorted(shares)[enough - 1], 1)
    print(f'val_share = {s.val_share:g} leaves {n_val} of {len(shares):,} documents for validation: it is raised to '
          f'{val_share:.2g}, which leaves {enough}', flush=True)
    return val_share
