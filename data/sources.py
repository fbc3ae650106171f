"""The documents of a source: a dataset of Hugging Face, files of records, or texts. Read `open_source` and `batches`.

A .txt file means the same to `train.py --data` and to prepare_fineweb.py: it is one document (with `split_lines` each
of its lines is one). A source of one .txt file is cut: its last 10% are the validation data.
"""
import glob
import gzip
import hashlib
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from common.files import UserError
from data.parts import part_numbers
from data.shards import hash_share, is_count, split_of

FINEWEB = 'HuggingFaceFW/fineweb-edu'
KINDS = ('.parquet', '.jsonl', '.json', '.jsonl.gz', '.json.gz', '.txt')  # endings of local files
OF_DATASETS = (*KINDS[:-1], '.arrow', '.csv', '.gz', '.zst')  # a folder with such files is for `datasets` to read
BATCH = 256  # records that are read, and then encoded, at a time
TAIL = 0.1  # share of the only text that becomes validation data, as nanoGPT has it
ENOUGH = 10  # validation documents; of fewer than 200 documents 5% are
START = {'state': None, 'skip': 0, 'documents': 0}  # the position of a source's first document
SHUFFLE_SEED = 2357  # official SPS code

# ---- which files ----

def text_files(name: str) -> list[str]:
    """The .txt files that a path names: itself, or those anywhere in a folder."""
    path = Path(name)
    if path.is_file():
        return [name] if name.endswith('.txt') else []
    return [str(file) for file in sorted(path.rglob('*.txt')) if file.is_file()]


def is_for_datasets(folder) -> bool:
    """Whether a folder holds files of records: its .txt files, a licence perhaps, are then not the texts."""
    return any(file.name.endswith(OF_DATASETS) for file in Path(folder).rglob('*'))


def local_files(name: str) -> list[str]:
    """The files that a path or a pattern names, all of one kind.

    [] if it names a dataset of the hub, or a folder that is for `datasets` to read: one of more than texts.
    """
    if os.path.isdir(name):
        return [] if is_for_datasets(name) else text_files(name)
    files = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
    if not files and (glob.has_magic(name) or name.endswith(KINDS)):
        raise UserError(f'no file matches {name}')
    json = '.jsonl', '.json', '.jsonl.gz', '.json.gz'
    if not any(all(file.endswith(kind) for file in files) for kind in (json, '.parquet', '.txt')):
        matches = ', '.join(files[:3]) + (' ...' if len(files) > 3 else '')
        raise UserError(f'{name} matches {matches}: expected files of one kind of {", ".join(KINDS)}')
    for file in files:
        if os.path.getsize(file) == 0 and not file.endswith('.txt'):
            raise UserError(f'{file} is empty: remove it, or fetch it again')
    return files


# ---- reading them ----

def open_source(name: str, s) -> tuple[Callable, str, int | None]:
    """(read, a checksum of what the source is, its number of records where that is known). With s.shuffle, shuffled.

    read(position) yields batches (state, [(place, record, split)]): where in the source the batch begins, and for each
    record, a dict, what is said of its place in an error, and its split where its hash does not decide that. The
    checksum is of the names, sizes and times of local files, and of the revision of a dataset on the hub.
    s: as prepare_fineweb.Settings. With s.part = '3/64' read yields that part alone, by whole files: the parts together
    are each document once. Where the source has fewer files than parts, of its documents every 64th from the third on.
    The checksum is of the whole source.
    """
    read, checksum, n_records = source_in_order(name, s)
    return (shuffled_read(read, s.shuffle) if s.shuffle else read), checksum, n_records


def source_in_order(name: str, s) -> tuple[Callable, str, int | None]:
    """`open_source` of the documents in their order; with s.shuffle the files are in another."""
    files = local_files(name)
    part = part_numbers(s.part) if s.part else (0, 1)
    if files and not files[0].endswith('.parquet'):
        checksum = checksum_of_files(files)
        shuffle_files(files, s)
        if len(files) < part[1]:
            return part_of_records(lambda position: file_batches(files, s, position['state']), *part), checksum, None
        return lambda position: file_batches(files, s, position['state'], *part), checksum, None
    if os.path.isfile(f'{name}/state.json') or os.path.isfile(f'{name}/dataset_dict.json'):
        return saved_source(name, s, part)
    import datasets
    config = s.config or ('sample-100BT' if name == FINEWEB else None)  # of a preparation that older code began
    try:
        if files:
            builder = datasets.load_dataset_builder('parquet', data_files=[glob.escape(file) for file in files])
        else:
            builder = datasets.load_dataset_builder(name, config)
        identity = [builder.hash]
        for split, of_split in (builder.config.data_files or {}).items():
            for file, origin in zip(of_split, of_split.origin_metadata):  # the origin: revision on the hub, or time
                identity.append((str(split), file, origin, os.path.getsize(file) if os.path.isfile(file) else None))
            shuffle_files(of_split, s)
        stream = builder.as_streaming_dataset(split='train' if files else s.split)
    except Exception as error:  # no such dataset, configuration or split, no network, or a damaged file
        if os.path.isdir(name) and isinstance(error, FileNotFoundError):
            raise UserError(f'{name} has no files that can be read: expected some of {", ".join(KINDS)}, or what else '
                            'the library datasets reads; texts with another ending need the name .txt')
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')
    info = stream.info.splits and stream.info.splits.get(s.split)
    index, n_parts = part
    is_by_file = stream.n_shards >= n_parts
    if is_by_file:
        stream = stream.shard(n_parts, index)

    def read(position):
        return stream_batches(name, stream.with_format('arrow'), s, position)
    return (read if is_by_file else part_of_records(read, *part), checksum_of(identity),
            info and info.num_examples // n_parts)


def part_of_records(read: Callable, index: int, n_parts: int) -> Callable:
    """A `read` of every n_parts-th record of another one, from the index-th on. All are read, few are encoded."""
    print(f'the source has fewer than {n_parts} files: this part is every {n_parts}-th of its documents', flush=True)

    def read_part(position):
        begin = position['state'] or {'source': None, 'records': 0}
        if not is_count(begin.get('records'), 0) or not isinstance(begin.get('source'), dict | None):
            raise no_such_place(begin)
        n_read = begin['records']
        for state, batch in read({'state': begin['source'], 'skip': 0, 'documents': n_read}):
            yield {'source': state, 'records': n_read}, batch[(index - n_read) % n_parts::n_parts]
            n_read += len(batch)
    return read_part


def saved_source(name: str, s, part: tuple[int, int]) -> tuple[Callable, str, int]:
    """`open_source` of a folder that `save_to_disk` of a dataset, or of a dict of them, wrote."""
    import datasets
    try:
        saved = datasets.load_from_disk(name)
    except Exception as error:  # the library raises nothing narrower for a folder that is damaged
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')
    if isinstance(saved, datasets.DatasetDict):
        if s.split not in saved:
            raise UserError(f'{name} has no split {s.split!r}: set --split to one of {", ".join(saved)}')
        saved = saved[s.split]
    index, n_parts = part
    files = sorted(str(path) for path in Path(name).rglob('*') if path.is_file())
    if index >= len(saved):  # the library has no empty shards
        return lambda position: iter(()), checksum_of_files(files), 0
    saved = saved.with_format(None).shard(n_parts, index, contiguous=True)  # a format may have been saved with it
    stream = saved.to_iterable_dataset().with_format('arrow')
    return lambda position: stream_batches(name, stream, s, position), checksum_of_files(files), len(saved)


def shuffle_files(files: list, s) -> None:
    """With s.shuffle, puts a source's files in another order, always the same one."""
    if s.shuffle:
        random.Random(SHUFFLE_SEED).shuffle(files)


def shuffled_read(read: Callable, n: int) -> Callable:
    """A `read` that yields the records of another one shuffled, in blocks of n.

    A block is read whole and shuffled by its number. So a place in it is the place in the source where the block begins
    and how many of its records have been yielded: reading goes on from there exactly, and no buffer need be saved. (The
    official SPS code has a buffer of n that slides, one for each of its processes.)
    """
    def read_blocks(position):
        begin = position['state'] or {'source': None, 'skip': 0, 'block': 0, 'yielded': 0}
        counts = [begin.get(name) for name in ('skip', 'block', 'yielded')]
        if not all(is_count(count, 0) for count in counts) or not isinstance(begin.get('source'), dict | None):
            raise no_such_place(begin)
        skip, block, yielded = counts
        source = read({'state': begin['source'], 'skip': skip, 'documents': block * n})
        records = ((state, i, record) for state, batch in source for i, record in enumerate(batch))
        records = islice(records, skip, None)
        while found := list(islice(records, n)):
            state, skip, _ = found[0]
            random.Random(f'{SHUFFLE_SEED} {block}').shuffle(found)
            for start in range(yielded, len(found), BATCH):
                batch = [(f'{place} in the shuffled order', *rest)
                         for *_, (place, *rest) in found[start:start + BATCH]]
                yield {'source': state, 'skip': skip, 'block': block, 'yielded': start}, batch
            block, yielded = block + 1, 0
            found.clear()  # so that no two blocks are in memory
    return read_blocks


def no_such_place(state) -> UserError:
    return UserError(f'progress.json is damaged: {state!r:.100} is no place in the source; remove its folder and start '
                     'again')


def checksum_of_files(files: list[str]) -> str:
    stats = [(file, os.stat(file)) for file in files]
    return checksum_of([(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats])


def checksum_of(identity: list) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def stream_batches(name: str, stream, s, position: dict) -> Iterator[tuple]:
    """`read` of a stream of Arrow tables, a datasets.IterableDataset."""
    state, documents = position['state'], position['documents'] - position['skip']
    if state:
        stream.load_state_dict(state)
    tables, fields = stream.iter(BATCH), {s.text_field, s.id_field} - {None}
    while True:
        try:
            table = next(tables, None)
            if table is None:
                return
            if fields <= set(table.column_names):
                table = table.select(sorted(fields))
            records = table.to_pylist()
        except Exception as error:  # each kind of file has its own; or text that is not UTF-8
            raise UserError(f'{name} cannot be read after record {documents:,} ({type(error).__name__}): {error}')
        documents += len(records)
        yield state, [('', record, None) for record in records]
        state = stream.state_dict()


def file_batches(files: list[str], s, state: dict | None, first: int = 0, step: int = 1) -> Iterator[tuple]:
    """`read` of json and txt files: of every step-th, from the first-th on."""
    state = state or {'file': first, 'line': 0}
    if not (is_count(state.get('file'), 0) and state['file'] < len(files) and is_count(state.get('line'), 0)):
        raise no_such_place(state)
    records = file_records(files, s, state, step)
    while batch := list(islice(records, BATCH)):
        yield batch[0][0], [record for _, *record in batch]


def file_records(files: list[str], s, state: dict, step: int) -> Iterator[tuple]:
    """Yields (state, place, record, split) from a line of a file on: a state is the number of a file and of a line.

    Of the files that follow, every step-th.
    """
    read = json_records
    if files[0].endswith('.txt'):
        is_cut = len(files) == 1 and not s.split_lines
        read = partial(line_records if s.split_lines else cut_text if is_cut else whole_text, s)
    for i in range(state['file'], len(files), step):
        file = files[i]
        first = state['line'] if i == state['file'] else 0
        n_read = first
        try:
            for n, record, split in read(file, first):
                yield {'file': i, 'line': n}, f' ({file}, line {n + 1:,})', record, split
                n_read = n + 1
        except (ValueError, EOFError, OSError, RecursionError, zlib.error) as error:
            remedy = ': expected text in UTF-8' if isinstance(error, UnicodeDecodeError) else ''
            raise UserError(f'{file} cannot be read after line {n_read:,} ({type(error).__name__}): {error}{remedy}')


def text_record(s, text: str) -> dict:
    """A text as a record: what decides between train and val is the text itself."""
    return {s.id_field: text, s.text_field: text}


def whole_text(s, file: str, first: int) -> Iterator[tuple]:
    """Yields (number, record, split) of a file that is one document; nothing if it is blank."""
    text = Path(file).read_text(encoding='utf-8')
    if first == 0 and text.strip():
        yield 0, text_record(s, text), None


def line_records(s, file: str, first: int) -> Iterator[tuple]:
    """Yields (number, record, split) of the lines that are not blank."""
    with open(file, encoding='utf-8') as lines:
        for n, line in enumerate(lines):
            if n >= first and line.strip():
                yield n, text_record(s, line.rstrip('\n')), None


def cut_text(s, file: str, first: int) -> Iterator[tuple]:
    """Yields (number, record, split) of the two parts of the only text, cut at the end of a line where one is near."""
    text = Path(file).read_text(encoding='utf-8')
    cut = int(len(text) * (1 - TAIL))
    cut = text.rfind('\n', int(0.9 * cut), cut) + 1 or cut
    for n, (part, split) in enumerate(((text[:cut], 'train'), (text[cut:], 'val'))):
        if n >= first and part.strip():
            yield n, text_record(s, part), split


def json_records(file: str, first: int) -> Iterator[tuple]:
    """Yields (number, record, None) of the lines of a file from the first-th on, or of the list that .json may be."""
    with (gzip.open if file.endswith('.gz') else open)(file, 'rb') as lines:
        begin = lines.peek(64).lstrip(b'\xef\xbb\xbf \t\r\n')
        if file.removesuffix('.gz').endswith('.json') and begin.startswith(b'['):
            for n, record in islice(enumerate(json.load(lines)), first, None):
                yield n, record, None
            return
        for n, line in enumerate(lines):
            if n >= first and (line := line.strip()):
                yield n, json.loads(line), None


# ---- documents ----

def batches(read: Callable, s, position: dict) -> Iterator[tuple]:
    """Yields (position of the first record, [(split, text)]) in the order of the source."""
    for begin, found in documents(read, s, position):
        yield begin, [(split or split_of(key, s.val_share, s.val_hash), text) for split, key, text in found]


def documents(read: Callable, s, position: dict) -> Iterator[tuple]:
    """Yields (position of the first record, [(split or None, what is hashed, text)]) in the order of the source.

    A position is {'state': of the source, 'skip': records to skip after it, 'documents': records before}.
    """
    skip, n_read = position['skip'], position['documents']
    for state, records in read(position):
        position, found = {'state': state, 'skip': skip, 'documents': n_read}, []
        for place, record, split in records[skip:]:
            n_read += 1
            found.append((split, *document(record, f'record {n_read:,}{place}', s)))
        yield position, found
        skip = 0


def fitting_share(read: Callable, s, max_tokens: int | None = None) -> float:
    """val_share, or a larger one, which it prints, where val_share would leave too few documents for validation.

    Enough are ENOUGH documents; of fewer than 200 documents, 5%. It reads until it has found enough, or as many bytes
    as max_tokens: a document hardly ever has more tokens than bytes, so those it has read will be taken.
    """
    hashes, n_val, n_bytes = set(), 0, 0
    for split, key, text in (found for _, batch in documents(read, s, START) for found in batch):
        if split:
            print(f'one text: its last {TAIL:.0%} are the validation data', flush=True)
            return s.val_share
        share = hash_share(key, s.val_hash)
        n_val += share < s.val_share and share not in hashes
        hashes.add(share)
        n_bytes += len(text.encode()) + 1
        if n_val == ENOUGH or (max_tokens and n_bytes >= max_tokens):
            break
    enough = min(ENOUGH, max(1, len(hashes) // 20))
    if n_val >= enough or len(hashes) < 2:
        return s.val_share
    val_share = math.nextafter(sorted(hashes)[enough - 1], 1)
    print(f'val_share = {s.val_share:g} leaves {n_val} of {len(hashes):,} documents for validation: it is '
          f'{val_share:.2g} now, which leaves {enough}', flush=True)
    return val_share


def document(record, place: str, s) -> tuple[str, str]:
    """(what is hashed, text) of a record; UserError if a field is missing or of another type."""
    if not isinstance(record, dict):
        raise UserError(f'{place} is {record!r:.60}: expected an object with fields, {{"{s.text_field}": ...}}')
    for field, kind in ((s.text_field, str), (s.id_field, (str, int))):
        if field is not None and not isinstance(record.get(field), kind):
            has = f'has {record[field]!r:.60} in' if field in record else 'has no'
            fields = ', '.join([*record][:20])
            raise UserError(f'{place} {has} field {field!r}, expected {"text" if kind is str else "an id"}; the fields '
                            f'are {fields}: set --text_field, or --id_field (None: the hash of the text decides '
                            'between train and val)')
    text = printable(record[s.text_field])
    return text if s.id_field is None else printable(str(record[s.id_field])), text


def printable(text: str) -> str:
    """The text with what is no Unicode character (half a surrogate pair) replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode(errors='replace').decode()
