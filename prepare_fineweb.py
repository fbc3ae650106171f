"""Tokenizes a Hugging Face dataset, or local files, into the shards that train.py reads.

    python prepare_fineweb.py                                       FineWeb-Edu, sample-100BT, with the GPT-2 tokenizer
    python prepare_fineweb.py --max_tokens=2e9 --out_dir=data/built/fw2b
    python prepare_fineweb.py 'texts/*.jsonl.gz' --tokenizer=tokenizer.json
    python train.py config/standard_xs.py --data=data/built/fw2b

The source is streamed: what is not needed is not downloaded. Local files are parquet, jsonl, jsonl.gz or txt (one
document a file), given by path, pattern, or as a folder that `datasets` understands. The shards depend on the source
and the settings alone, not on the number of workers or on interruptions: started again, it checks what it has written,
and that the source is the same, and goes on after its last whole shard.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import datetime
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from common.files import (
    UserError,
    checked_json,
    friendly_errors,
    locked,
    read_json,
    sha256,
    write_file,
    write_json,
)
from common.machine import no_bars_in_logs
from common.settings import check_ranges, load_settings
from data.shards import (
    BUILT,
    ShardWriter,
    check_shard,
    check_split,
    expect,
    is_count,
    piece_checksums,
    split_of,
)
from data.tokenizers import Tokenizer, load_tokenizer

FINEWEB = 'HuggingFaceFW/fineweb-edu'
KINDS = ('.parquet', '.jsonl', '.json', '.jsonl.gz', '.json.gz', '.txt')  # endings of local files
BATCH = 256  # records that a worker encodes at a time
MAX_TOKENS, MAX_SHARD_TOKENS = 10 ** 15, 10 ** 10  # a shard is in memory before it is written
AHEAD = 100  # batches read ahead, so that workers are busy while a shard is written


@dataclass
class Settings:
    out_dir: str = ''  # data folder to write; '': data/built/ and the source's name
    config: str | None = None  # the dataset's configuration; None: sample-100BT for FineWeb-Edu, else its only one
    split: str = 'train'  # split of the dataset that is read; train and val are both made from it
    text_field: str = 'text'  # field of a record that holds the document
    id_field: str | None = 'id'  # field whose hash decides between train and val; None: the text itself
    tokenizer: str = 'gpt2'  # gpt2, byte, or the path of a tokenizer.json or a SentencePiece .model
    vocab_dir: str | None = None  # folder with GPT-2's encoder.json and vocab.bpe, where they cannot be downloaded
    max_tokens: int | None = None  # stop with the document that reaches so many tokens; None: read all
    val_share: float = 0.001  # share of the documents that become validation data
    shard_tokens: int = 100_000_000  # tokens of a shard; the document that fills it is its last
    workers: int | None = None  # processes that encode; None: one per core


# ---- the source ----

def local_files(name: str) -> list[str]:
    """The files that a path or a pattern names, all of one kind; none if it names a folder or a dataset of the hub."""
    if os.path.isdir(name):
        return []
    files = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
    if not files and (glob.has_magic(name) or name.endswith(KINDS)):
        raise UserError(f'no file matches {name}')
    is_json = [file.endswith(('.jsonl', '.json', '.jsonl.gz', '.json.gz')) for file in files]
    kinds = [is_json, *([file.endswith(kind) for file in files] for kind in ('.parquet', '.txt'))]
    if not any(map(all, kinds)):
        matches = ', '.join(files[:3]) + (' ...' if len(files) > 3 else '')
        raise UserError(f'{name} matches {matches}: expected files of one kind of {", ".join(KINDS)}')
    for file in files:
        if os.path.getsize(file) == 0 and not file.endswith('.txt'):
            raise UserError(f'{file} is empty: remove it, or fetch it again')
    return files


def open_source(name: str, s: Settings) -> tuple[Callable, str, int | None]:
    """(read, a checksum of what the source is, its number of records where that is known).

    read(position) yields batches (state, [(place, record)]): where in the source the batch begins, and for each record,
    a dict, what is said of its place in an error. The checksum is of the names, sizes and times of local files, and of
    the revision of a dataset on the hub.
    """
    files = local_files(name)
    if files and not files[0].endswith('.parquet'):
        stats = [(file, os.stat(file)) for file in files]
        identity = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
        return lambda position: file_batches(files, position['state']), checksum_of(identity), None
    import datasets
    config = s.config or ('sample-100BT' if name == FINEWEB else None)
    try:
        if files:
            builder = datasets.load_dataset_builder('parquet', data_files=[glob.escape(file) for file in files])
        else:
            builder = datasets.load_dataset_builder(name, config)
        stream = builder.as_streaming_dataset(split='train' if files else s.split)
    except Exception as error:  # no such dataset, configuration or split, no network, or a damaged file
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')
    identity = [builder.hash]
    for split, of_split in (builder.config.data_files or {}).items():
        for file, origin in zip(of_split, of_split.origin_metadata):  # the origin: revision on the hub, or time
            identity.append((str(split), file, origin, os.path.getsize(file) if os.path.isfile(file) else None))
    info = stream.info.splits and stream.info.splits.get(s.split)
    return (lambda position: stream_batches(name, stream.with_format('arrow'), s, position), checksum_of(identity),
            info and info.num_examples)


def checksum_of(identity: list) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def stream_batches(name: str, stream, s: Settings, position: dict) -> Iterator[tuple]:
    """`read` of a stream of Arrow tables, a datasets.IterableDataset."""
    state, documents = position['state'], position['documents'] - position['skip']
    if state:
        stream.load_state_dict(state)
    tables, fields = stream.iter(BATCH), {s.text_field, s.id_field} - {None}
    while True:
        try:
            table = next(tables, None)
        except Exception as error:  # each kind of file has its own
            raise UserError(f'{name} cannot be read after record {documents:,} ({type(error).__name__}): {error}')
        if table is None:
            return
        documents += len(table)
        if fields <= set(table.column_names):
            table = table.select(sorted(fields))
        yield state, [('', record) for record in table.to_pylist()]
        state = stream.state_dict()


def file_batches(files: list[str], state: dict | None) -> Iterator[tuple]:
    """`read` of json and txt files."""
    state = state or {'file': 0, 'line': 0}
    if not (is_count(state.get('file'), 0) and state['file'] < len(files) and is_count(state.get('line'), 0)):
        raise UserError(f'progress.json is damaged: {state!r:.100} is no place in the source; remove its folder '
                        'and start again')
    records = file_records(files, state)
    while batch := list(islice(records, BATCH)):
        yield batch[0][0], [(place, record) for _, place, record in batch]


def file_records(files: list[str], state: dict) -> Iterator[tuple]:
    """Yields (state, place, record) from a line of a file on: a state is the number of a file and of a line in it."""
    for i, file in enumerate(files[state['file']:], state['file']):
        first = state['line'] if i == state['file'] else 0
        n_read = first
        try:
            for n, record in [(0, text_record(file))] if file.endswith('.txt') else json_records(file, first):
                yield {'file': i, 'line': n}, f' ({file}, line {n + 1:,})', record
                n_read = n + 1
        except (ValueError, EOFError, OSError, RecursionError, zlib.error) as error:
            raise UserError(f'{file} cannot be read after line {n_read:,} ({type(error).__name__}): {error}')


def text_record(file: str) -> dict:
    with open(file, encoding='utf-8') as text:
        return {'text': text.read()}


def json_records(file: str, first: int) -> Iterator[tuple]:
    """Yields (number, record) of the lines of a file from the first-th on, or of the list that a .json file may be."""
    with (gzip.open if file.endswith('.gz') else open)(file, 'rb') as lines:
        begin = lines.peek(64).lstrip(b'\xef\xbb\xbf \t\r\n')
        if file.removesuffix('.gz').endswith('.json') and begin.startswith(b'['):
            yield from islice(enumerate(json.load(lines)), first, None)
            return
        for n, line in enumerate(lines):
            if n >= first and (line := line.strip()):
                yield n, json.loads(line)


def batches(read: Callable, s: Settings, position: dict) -> Iterator[tuple]:
    """Yields (position of the first record, [(split, text)]) in the order of the source.

    A position is {'state': of the source, 'skip': records to skip after it, 'documents': records before}.
    """
    skip, documents = position['skip'], position['documents']
    for state, records in read(position):
        position, found = {'state': state, 'skip': skip, 'documents': documents}, []
        for place, record in records[skip:]:
            documents += 1
            found.append(document(record, f'record {documents:,}{place}', s))
        yield position, found
        skip = 0


def document(record, place: str, s: Settings) -> tuple[str, str]:
    """(split, text) of a record; UserError if a field is missing or of another type."""
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
    return split_of(text if s.id_field is None else printable(str(record[s.id_field])), s.val_share), text


def printable(text: str) -> str:
    """The text with what is no Unicode character (half a surrogate pair) replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode(errors='replace').decode()


# ---- encoding in worker processes ----

def start_worker(tokenizer_name: str) -> None:
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_name)


def end_with_parent() -> None:
    """Ends this worker when its parent has ended, killed too: workers hold its lock of the folder as it does."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(batch: list[tuple]) -> list[tuple]:
    """[(split, text)] -> [(split, ids with eos, bytes of the text)]."""
    dtype = np.uint16 if tokenizer.n_ids <= 2 ** 16 else np.uint32
    encode_text = tokenizer.encode_array or tokenizer.encode
    documents = []
    for split, text in batch:
        ids = np.asarray(encode_text(text), dtype)
        documents.append((split, np.append(ids, dtype(tokenizer.eos_id)), len(text.encode())))
    return documents


@contextmanager
def worker_pool(s: Settings, tokenizer_name: str) -> Iterator[ProcessPoolExecutor]:
    """Processes that `encode`. To be started before the source, which may run threads: a fork copies none of them.

    A fork spares the workers the imports.
    """
    method = 'fork' if sys.platform == 'linux' else 'spawn'
    pool = ProcessPoolExecutor(s.workers, multiprocessing.get_context(method), start_worker, (tokenizer_name,))
    try:
        pool.submit(os.getpid)
        yield pool
    except BrokenProcessPool:
        raise UserError('a worker process was killed, perhaps for want of memory: start again with fewer --workers; '
                        'what is written stays')
    finally:
        pool.shutdown(cancel_futures=True)


def encoded(pool: ProcessPoolExecutor, batches: Iterator[tuple], ahead: int) -> Iterator[tuple]:
    """Yields (position of a batch, its documents encoded) in order, up to `ahead` batches in the workers meanwhile."""
    waiting = deque()
    for start, batch in batches:
        waiting.append((start, pool.submit(encode, batch)))
        if len(waiting) > ahead:
            start, future = waiting.popleft()
            yield start, future.result()
    for start, future in waiting:
        yield start, future.result()


# ---- progress that survives a kill ----

def check_folder(folder: Path) -> None:
    """Raises UserError unless the folder is new, empty, or begun by a start of this script that did not finish."""
    if (folder / 'meta.json').exists():
        raise UserError(f'{folder} is complete (it has a meta.json): remove it first, or write to another --out_dir')
    if folder.exists() and not folder.is_dir():
        raise UserError(f'{folder} is a file: give --out_dir a folder')
    files = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(files - {'.lock', '.progress.json.writing'})
    if 'progress.json' in files:
        read_progress(folder)
    elif foreign:
        raise UserError(f'{folder} has files that are not of a preparation ({", ".join(foreign[:3])}): give --out_dir '
                        'a new or an empty folder')


def read_progress(folder: Path) -> dict:
    """What progress.json says. Raises UserError if it is damaged."""
    return read_json(folder / 'progress.json', 'it may be of another program. Give another --out_dir, or remove '
                     f'{folder} if nothing else is in it', check_progress)


def check_progress(saved: dict) -> None:
    """Raises ValueError for a value that no progress.json has."""
    for name in ('arguments', 'splits', 'position', 'pending'):
        expect(isinstance(saved.get(name), dict), name, saved.get(name))
    for name, split in saved['splits'].items():
        check_split(name, split)
    for name, record in saved['pending'].items():
        check_shard(name, record)
    state, skip, documents = (saved['position'].get(name) for name in ('state', 'skip', 'documents'))
    expect(isinstance(state, dict | None) and 'state' in saved['position'], 'state', state)
    expect(is_count(skip, 0), 'skip', skip)
    expect(is_count(documents, 0), 'documents', documents)


def save_progress(folder: Path, arguments: dict, writer: ShardWriter, position: dict) -> None:
    """Writes progress.json: the shards so far, where the source goes on, and what waits for each split's next shard."""
    pending = {}
    for split, parts in writer.pending.items():
        if parts:
            ids = np.concatenate(parts)
            name = f'.pending_{split}_{position["documents"]}.bin'
            write_file(folder / name, ids.tobytes())
            pending[split] = {'file': name, 'tokens': len(ids), 'sha256': hashlib.sha256(ids).hexdigest()}
    write_json(folder / 'progress.json', checked_json(
        {'arguments': arguments, 'splits': writer.splits, 'position': position, 'pending': pending}))
    kept = {record['file'] for record in pending.values()}
    for path in folder.glob('.pending_*'):
        if path.name not in kept:
            path.unlink()


def load_progress(folder: Path, arguments: dict, tokenizer: Tokenizer, shard_tokens: int) -> tuple[ShardWriter, dict]:
    """(writer, position) of the start before, or of none.

    Raises UserError if its arguments or its source were others, or if what it wrote is not there any more as it was.
    """
    writer = ShardWriter(folder, tokenizer, shard_tokens)
    saved = read_progress(folder) if (folder / 'progress.json').exists() else None
    if not saved or not saved['position']['documents']:  # without a whole shard, other arguments are as good
        return writer, {'state': None, 'skip': 0, 'documents': 0}
    for name, value in arguments.items():
        begun_with = saved['arguments'].get(name)
        if begun_with != value:
            if name.endswith('_checksum'):
                raise UserError(f'the {name.removesuffix("_checksum")} has changed since {folder} was begun (names, '
                                'sizes, times or revision of its files): use it as it was, or another --out_dir')
            raise UserError(f'{folder} was begun with {name} = {begun_with!r}, now it is {value!r}: use that, or '
                            'another --out_dir')
    shards = [record for split in saved['splits'].values() for record in split['shards']]
    if shards:
        print(f'{folder} has {len(shards)} whole shards: checking them, then going on after document '
              f'{saved["position"]["documents"]:,}', flush=True)
    for record in shards:
        checksums = piece_checksums(checked_ids(folder, record, writer.dtype))
        path = (folder / record['file']).with_suffix('.crc32')
        if not path.is_file() or path.read_bytes() != checksums:
            write_file(path, checksums)
    pending = {split: checked_ids(folder, record, writer.dtype) for split, record in saved['pending'].items()}
    return ShardWriter(folder, tokenizer, shard_tokens, saved['splits'], pending), saved['position']


def checked_ids(folder: Path, record: dict, dtype: np.dtype) -> np.ndarray:
    """The ids of a shard or of a file of pending ids; UserError if they are not those of its record."""
    path = folder / record['file']
    content = path.read_bytes() if path.is_file() else None
    size = record['tokens'] * dtype.itemsize
    if content is None or len(content) != size or hashlib.sha256(content).hexdigest() != record['sha256']:
        fault = ('is missing' if content is None else f'has {len(content)} bytes and had {size}' if len(content) != size
                 else 'does not match its checksum in progress.json')
        raise UserError(f'{path} {fault}: remove {folder} and start again')
    return np.frombuffer(content, dtype)


class Report:
    """A line of progress every few seconds, counted from the start of this process."""

    def __init__(self, max_tokens, all_documents, tokens, documents):
        self.max_tokens, self.all_documents = max_tokens, all_documents
        self.tokens, self.documents, self.start, self.last = tokens, documents, time.time(), time.time()

    def __call__(self, tokens, documents):
        now = time.time()
        if now - self.last < 5:
            return
        self.last = now
        tokens_per_s = (tokens - self.tokens) / (now - self.start)
        documents_per_s = (documents - self.documents) / (now - self.start)
        left = [(self.max_tokens - tokens) / tokens_per_s] if self.max_tokens and tokens_per_s else []
        left += [(self.all_documents - documents) / documents_per_s] if self.all_documents and documents_per_s else []
        eta = f' | ETA {datetime.timedelta(seconds=min(1e9, max(0, int(min(left)))))}' if left else ''
        print(f'{documents:,} documents, {tokens:,} tokens | {documents_per_s:,.0f} documents/s, '
              f'{tokens_per_s:,.0f} tokens/s{eta}', flush=True)


# ---- main ----

def prepare(name: str, s: Settings) -> None:
    """Writes the data folder of a source, or goes on with it."""
    plain = re.sub(r'\W+', '_', Path(name).name.split('.')[0]).strip('_')
    folder = Path(s.out_dir) if s.out_dir else BUILT / (plain or 'files')
    check_folder(folder)  # before anything is written there, the lock included
    tokenizer = load_tokenizer(s.vocab_dir if s.tokenizer == 'gpt2' and s.vocab_dir else s.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), worker_pool(s, tokenizer.name) as pool:
        check_folder(folder)  # once more: it may have been finished meanwhile
        read, source_checksum, n_records = open_source(name, s)
        arguments = {'source': name, **dataclasses.asdict(s), 'source_checksum': source_checksum,
                     'tokenizer_checksum': tokenizer_checksum(tokenizer.name)}
        for of_this_start in ('out_dir', 'workers', 'vocab_dir'):
            del arguments[of_this_start]
        writer, position = load_progress(folder, arguments, tokenizer, s.shard_tokens)
        save = partial(save_progress, folder, arguments, writer)
        save(position)  # by which the next start knows the folder
        fill(writer, encoded(pool, batches(read, s, position), AHEAD), position, save, s.max_tokens, n_records)
        if not writer.splits:
            raise UserError(f'{name} has no records: expected some with a field {s.text_field!r}')
        writer.finish()
        for path in (folder / 'progress.json', *folder.glob('.pending_*')):
            path.unlink()
    for split, info in sorted(writer.splits.items()):
        print(f'{split}: {info["documents"]:,} documents, {info["tokens"]:,} tokens in {len(info["shards"])} shards')
    print(f'{folder} is ready: python train.py config/standard_xs.py --data={folder}')


def tokenizer_checksum(name: str) -> str | None:
    """Of the content of a tokenizer given by path; of GPT-2's files there is one version alone."""
    return sha256(name) if os.path.isfile(name) else None


def fill(writer: ShardWriter, encoded_batches, position: dict, save: Callable, max_tokens, n_records) -> None:
    """Adds encoded batches, which begin at `position`, to the writer, until their end or max_tokens."""
    documents, tokens = position['documents'], sum(info['tokens'] for info in writer.splits.values())
    report = Report(max_tokens, n_records, tokens, documents)
    for start, batch in encoded_batches:
        for i, (split, ids, n_bytes) in enumerate(batch):
            if max_tokens is not None and tokens >= max_tokens:
                return
            tokens += len(ids)
            documents += 1
            if writer.add(split, ids, n_bytes):
                save({**start, 'skip': start['skip'] + i + 1, 'documents': documents})
        report(tokens, documents)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if len(positional) > 1:
            raise UserError(f'one source is expected, got {len(positional)}: {" ".join(positional)}; '
                            "quote a pattern: 'texts/*.jsonl'")
        check_ranges(s, max_tokens=(1, MAX_TOKENS), shard_tokens=(1, MAX_SHARD_TOKENS), workers=(1, 1024))
        if not 0 < s.val_share < 1:
            raise UserError(f'val_share is {s.val_share}: expected more than 0 and less than 1, as train.py needs '
                            'documents to train on and to validate on')
        if positional == ['']:
            raise UserError('the source is empty: expected a file, a pattern, a folder or a dataset of the hub')
        no_bars_in_logs()
        prepare(positional[0] if positional else FINEWEB, s)


if __name__ == '__main__':
    main()
