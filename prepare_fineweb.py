"""Tokenizes a Hugging Face dataset, or local files, into the shards that train.py reads.

    python prepare_fineweb.py --max_tokens=51e9                     FineWeb-Edu in GPT-2 tokens, for all SPS runs
    python prepare_fineweb.py --max_tokens=2e9 --out_dir=data/built/fw2b
    python prepare_fineweb.py 'texts/*.jsonl.gz' --tokenizer=tokenizer.json
    python train.py config/standard_xs.py --data=data/built/fw2b

On many machines, each with a part of the source, which are then made one data folder without copying (data/parts.py):

    python prepare_fineweb.py --max_tokens=51e9 --part=3/64         in data/built/fineweb_edu_part_03_of_64
    python prepare_fineweb.py --merge data/built/fineweb_edu_part_*

The source is streamed: what is not needed is not downloaded. Local files are parquet, jsonl, jsonl.gz or txt (one
document a file, or with --split_lines a line), given by path, pattern, or as a folder: of texts, one that `datasets`
understands, or one that `save_to_disk` wrote (data/sources.py). The shards depend on the source and the settings alone,
not on the number of workers or on interruptions: started again, it checks what it has written, and that the source is
the same, and goes on after its last whole shard. A start that fails before its first whole shard leaves nothing.

FineWeb-Edu has defaults of its own, the official SPS code's (OF_FINEWEB): sample-350BT; a document is validation data
where the first 8 bytes of the md5 of "42:" and its id, a little-endian integer, are below 0.0005 of 2^64; files and
documents are shuffled. --shuffle=N holds N documents in memory, 1 GiB at 200,000.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import datetime
import hashlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from common.files import (
    UserError,
    friendly_errors,
    locked,
    read_json,
    sha256,
    write_file,
    write_json,
)
from common.settings import check_ranges, load_settings
from data.parts import finish_part, merge_parts, part_folder, part_numbers
from data.shards import (
    BUILT,
    TOKENIZER_FILES,
    ShardWriter,
    check_shard,
    check_split,
    document_ids,
    expect,
    is_count,
    piece_checksums,
)
from data.sources import FINEWEB, START, batches, fitting_share, local_files, open_source
from data.tokenizers import Tokenizer, load_tokenizer

OF_FINEWEB = {'config': 'sample-350BT', 'val_share': 0.0005, 'val_hash': 'md5', 'shuffle': 200_000}  # official SPS code
MAX_TOKENS, MAX_SHARD_TOKENS = 10 ** 15, 10 ** 10  # a shard is in memory before it is written
FINISHED = ('meta.json', 'part.json')  # of a data folder and of a part: written last
AHEAD = 100  # batches read ahead, so that workers are busy while a shard is written


@dataclass
class Settings:
    out_dir: str = ''  # data folder to write; '': data/built/ and the source's name
    config: str | None = None  # the dataset's configuration; None: its only one. FineWeb-Edu: sample-350BT
    split: str = 'train'  # split of the dataset that is read; train and val are both made from it
    text_field: str = 'text'  # field of a record that holds the document
    id_field: str | None = 'id'  # field whose hash decides between train and val; None, and for .txt: the text itself
    split_lines: bool = False  # a document is a line of a .txt file, not the whole file
    tokenizer: str = 'gpt2'  # gpt2, byte, a tokenizer.json, a SentencePiece .model, a folder with GPT-2's files
    bos: bool = False  # start each document with the tokenizer's bos; its eos ends it in any case
    max_tokens: int | None = None  # stop with the document that reaches so many tokens; None: read all
    val_share: float = 0.001  # of the documents, validation data; raised where too few. FineWeb-Edu: 0.0005
    val_hash: str = 'sha256'  # of the id, by which documents are chosen for that: sha256 or md5. FineWeb-Edu: md5
    shuffle: int = 0  # documents shuffled at a time, and the files' order; 0: as in the source. FineWeb-Edu: 200,000
    shard_tokens: int = 100_000_000  # tokens of a shard; the document that fills it is its last
    workers: int | None = None  # processes that encode; None: one per core
    part: str | None = None  # 3/64: the third of 64 parts of the source, and of max_tokens; all else as for the others
    merge: bool = False  # make one data folder of the parts whose folders are given


# ---- encoding in worker processes ----

def start_worker(tokenizer_name: str, bos: bool) -> None:
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_name, bos)


def end_with_parent() -> None:
    """Ends this worker when its parent has ended, killed too: workers hold its lock of the folder as it does."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(batch: list[tuple]) -> list[tuple]:
    """[(split, text)] -> [(split, ids with eos, and bos if asked for, bytes of the text)]."""
    return [(split, document_ids(tokenizer, text), len(text.encode())) for split, text in batch]


@contextmanager
def worker_pool(s: Settings, tokenizer_name: str) -> Iterator[ProcessPoolExecutor]:
    """Processes that `encode`. To be started before the source, which may run threads: a fork copies none of them.

    A fork spares the workers the imports.
    """
    method = 'fork' if sys.platform == 'linux' else 'spawn'
    pool = ProcessPoolExecutor(s.workers, multiprocessing.get_context(method), start_worker, (tokenizer_name, s.bos))
    try:
        pool.submit(os.getpid)
        yield pool
    except BrokenProcessPool:
        raise UserError('a worker process was killed, perhaps for want of memory: start again with fewer --workers; '
                        'what is written stays')
    finally:
        pool.shutdown(cancel_futures=True)


def encoded(pool: ProcessPoolExecutor, source_batches: Iterator[tuple]) -> Iterator[tuple]:
    """Yields (position of a batch, its documents encoded) in order, up to AHEAD batches in the workers meanwhile."""
    waiting = deque()
    for start, batch in source_batches:
        waiting.append((start, pool.submit(encode, batch)))
        if len(waiting) > AHEAD:
            start, future = waiting.popleft()
            yield start, future.result()
    for start, future in waiting:
        yield start, future.result()


# ---- progress that survives a kill ----

def check_folder(folder: Path) -> None:
    """Raises UserError unless the folder is new, empty, or begun by a start of this script that did not finish."""
    for name in FINISHED:
        if (folder / name).exists():
            raise UserError(f'{folder} is complete (it has a {name}) and can be used as it is: to prepare other data, '
                            'remove it or give another --out_dir')
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
    write_json(folder / 'progress.json', {
        'arguments': arguments, 'splits': writer.splits, 'position': position, 'pending': pending})
    kept = {record['file'] for record in pending.values()}
    for path in folder.glob('.pending_*'):
        if path.name not in kept:
            path.unlink()


def load_progress(folder: Path, arguments: dict, tokenizer: Tokenizer, shard_tokens: int) -> tuple:
    """(writer, position, the share of validation documents that fitted) of the start before; of none the last is None.

    Raises UserError if its arguments or its source were others, or if what it wrote is not there any more as it was.
    """
    writer = ShardWriter(folder, tokenizer, shard_tokens)
    saved = read_progress(folder) if (folder / 'progress.json').exists() else None
    if not saved or not saved['position']['documents']:  # without a whole shard, other arguments are as good
        return writer, START, None
    for name, value in arguments.items():
        begun_with = saved['arguments'].get(name, getattr(Settings, name, None))  # older code had fewer settings
        if begun_with != value:
            if name.endswith('_checksum'):
                raise UserError(f'the {name.removesuffix("_checksum")} has changed since {folder} was begun (names, '
                                'sizes, times or revision of its files, or the version of the library datasets): use '
                                'it as it was, or another --out_dir')
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
    val_share = saved['arguments'].get('fitting_share', arguments['val_share'])
    return ShardWriter(folder, tokenizer, shard_tokens, saved['splits'], pending), saved['position'], val_share


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
    folder = BUILT / (plain or 'files')
    if s.part:
        folder = part_folder(folder, s.part)
    if s.out_dir:
        folder = Path(s.out_dir)
    check_folder(folder)  # before anything is written there, the lock included
    local_files(name)  # a file that is missing is told before a tokenizer that cannot be downloaded
    tokenizer = load_tokenizer(s.tokenizer, s.bos)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), removed_on_failure(folder, is_new), worker_pool(s, tokenizer.name) as pool:
        if s.shuffle:
            print(f'shuffling {s.shuffle:,} documents at a time: each block is read before it is written', flush=True)
        read, source_checksum, n_records = open_source(name, s)
        arguments = {'source': name, **dataclasses.asdict(s), 'source_checksum': source_checksum,
                     'tokenizer_checksum': tokenizer_checksum(tokenizer.name)}
        for of_this_start in ('out_dir', 'workers', 'merge'):
            del arguments[of_this_start]
        writer, position, val_share = load_progress(folder, arguments, tokenizer, s.shard_tokens)
        if val_share is None:
            # of the whole source, so that it is the same for each part
            whole = open_source(name, dataclasses.replace(s, part=None))[0] if s.part else read
            val_share = fitting_share(whole, s, s.max_tokens)
        s = dataclasses.replace(s, val_share=val_share)
        arguments['fitting_share'] = val_share
        save = partial(save_progress, folder, arguments, writer)
        save(position)  # by which the next start knows the folder
        max_tokens = -(-s.max_tokens // part_numbers(s.part)[1]) if s.part and s.max_tokens else s.max_tokens
        fill(writer, encoded(pool, batches(read, s, position)), position, save, max_tokens, n_records)
        if not writer.splits and not s.part:  # a part may be empty, all of them may not
            raise UserError(f'{name} has no records: expected some with a field {s.text_field!r}')
        if s.part:
            finish_part(writer, arguments)
        else:
            writer.finish()
        for path in (folder / 'progress.json', *folder.glob('.pending_*')):
            path.unlink()
    if s.part:
        print(f'{folder} is part {s.part}: give it with the others to prepare_fineweb.py --merge')
    else:
        print_summary(folder, writer.splits)


def print_summary(folder: Path, splits: dict) -> None:
    for split, info in sorted(splits.items()):
        print(f'{split}: {info["documents"]:,} documents, {info["tokens"]:,} tokens in {len(info["shards"])} shards')
    print(f'{folder} is ready: {training_command(folder, splits)}')


@contextmanager
def removed_on_failure(folder: Path, is_new: bool) -> Iterator[None]:
    """Where a start fails before its first whole shard, it leaves nothing: what the script writes is removed again.

    A folder that is whole stays, whatever fails after. Raises UserError as `check_folder`, as the folder may have been
    finished before it was locked.
    """
    check_folder(folder)
    try:
        yield
    except BaseException:
        is_whole = any((folder / name).exists() for name in FINISHED)
        is_begun = (folder / 'progress.json').exists() and read_progress(folder)['position']['documents']
        if not is_whole and not is_begun:
            for pattern in (*TOKENIZER_FILES, 'train_[0-9]*', 'val_[0-9]*', '.pending_*', '.*.writing',
                            'progress.json', '.lock'):
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if is_new and not os.listdir(folder):
                folder.rmdir()
        raise


def training_command(folder: Path, splits: dict) -> str:
    """A command that trains on the data: a model for as much of it, with windows that both splits have."""
    n_train, n_val = splits['train']['tokens'], splits['val']['tokens']
    longest = min(n_train // 2, n_val - 1)
    options = [f'--data={folder}', f'--out_dir=out/{folder.resolve().name}']
    if longest < 256:
        options.append(f'--block_size={longest}')
    is_large = n_train >= 10 ** 8 and longest >= 4096
    config = 'config/standard_xs.py' if is_large else 'config/quickstart.py'
    return shlex.join(['python', 'train.py', config, *options])


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
        s, positional, given = load_settings(Settings, argv)
        if s.merge:
            if others := sorted(given.keys() - {'merge', 'out_dir'}):
                raise UserError(f'--merge is given with --{others[0]}: the settings are those of the parts; give '
                                '--out_dir alone')
            print_summary(*merge_parts(positional, s.out_dir, BUILT))
            return
        if s.part:
            part_numbers(s.part)
        if len(positional) > 1:
            raise UserError(f'one source is expected, got {len(positional)}: {" ".join(positional)}; '
                            "quote a pattern: 'texts/*.jsonl'")
        name = positional[0] if positional else FINEWEB
        if name == FINEWEB:
            s = dataclasses.replace(s, **{key: value for key, value in OF_FINEWEB.items() if key not in given})
        check_ranges(s, max_tokens=(1, MAX_TOKENS), shard_tokens=(1, MAX_SHARD_TOKENS), workers=(1, 1024),
                     shuffle=(0, 10 ** 8))
        if s.val_hash not in ('md5', 'sha256'):
            raise UserError(f'val_hash is {s.val_hash!r}: expected md5 or sha256')
        if not 0 < s.val_share < 1:
            raise UserError(f'val_share is {s.val_share}: expected more than 0 and less than 1, as train.py needs '
                            'documents to train on and to validate on')
        if positional == ['']:
            raise UserError('the source is empty: expected a file, a pattern, a folder or a dataset of the hub')
        prepare(name, s)


if __name__ == '__main__':
    main()
