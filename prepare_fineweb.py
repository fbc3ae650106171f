"""Tokenizes a Hugging Face dataset, or local files, into the shards that train.py reads.

    python prepare_fineweb.py                                       FineWeb-Edu, sample-100BT, with the GPT-2 tokenizer
    python prepare_fineweb.py --max_tokens=2e9 --out_dir=data/built/fw2b
    python prepare_fineweb.py 'texts/*.jsonl.gz' --tokenizer=tokenizer.json
    python train.py config/standard_xs.py --data=data/built/fw2b

The source is streamed: what is not needed is not downloaded. Local files are parquet, jsonl, jsonl.gz or txt (one
document a file), given by path, pattern, or as a folder that `datasets` understands. The shards depend on the source
and the settings alone, not on the number of workers or on interruptions: started again, it goes on after its last whole
shard.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import datetime
import fcntl
import glob
import json
import multiprocessing
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from common.files import UserError, friendly_errors, write_file, write_json
from common.settings import check_ranges, load_settings
from data.shards import BUILT, ShardWriter, split_of
from data.tokenizers import Tokenizer, load_tokenizer

FINEWEB = 'HuggingFaceFW/fineweb-edu'
KINDS = {  # ending of local files: what `datasets` reads them as
    '.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.jsonl.gz': 'json', '.json.gz': 'json', '.txt': 'text'}
BATCH = 256  # records that a worker encodes at a time
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

def open_source(name: str, s: Settings):
    """A stream of Arrow tables of records from local files or the hub, a datasets.IterableDataset."""
    import datasets
    files = sorted(glob.glob(name, recursive=True)) if not os.path.isdir(name) else []
    kind = next((kind for ending, kind in KINDS.items() if files and all(f.endswith(ending) for f in files)), None)
    if files and kind is None:
        matches = ', '.join(files[:3]) + (' ...' if len(files) > 3 else '')
        raise UserError(f'{name} matches {matches}: expected files of one kind of {", ".join(KINDS)}')
    if not files and (glob.has_magic(name) or name.endswith(tuple(KINDS))):
        raise UserError(f'no file matches {name}')
    try:
        if kind:
            options = {'sample_by': 'document'} if kind == 'text' else {}
            source = datasets.load_dataset(kind, data_files=files, split='train', streaming=True, **options)
        else:
            config = s.config or ('sample-100BT' if name == FINEWEB else None)
            source = datasets.load_dataset(name, config, split=s.split, streaming=True)
        return source.with_format('arrow')
    except (OSError, ValueError) as error:  # no such dataset, configuration or split, or no network
        raise UserError(f'{name} could not be opened ({type(error).__name__}): {error}')


def batches(source, s: Settings, position: dict) -> Iterator[tuple]:
    """Yields (position of the first record, [(split, text)]) in the order of the source.

    A position is {'state': of the stream, 'skip': records to skip after it, 'documents': records before}.
    """
    if position['state']:
        source.load_state_dict(position['state'])
    tables, documents = source.iter(BATCH), position['documents']
    while True:
        try:
            table = next(tables, None)
        except Exception as error:  # each kind of file has its own
            raise UserError(f'the source cannot be read after record {documents:,} ({type(error).__name__}): {error}')
        if table is None:
            return
        table = table.slice(position['skip'])
        texts = column(table, s.text_field, str, documents)
        ids = texts if s.id_field is None else column(table, s.id_field, (str, int), documents)
        splits = [split_of(printable(str(id)), s.val_share) for id in ids]
        yield position, list(zip(splits, map(printable, texts)))
        documents += len(texts)
        position = {'state': source.state_dict(), 'skip': 0, 'documents': documents}


def column(table, field: str, kind, documents: int) -> list:
    """The values of a field; UserError for the first record whose value is not of this kind."""
    remedy = (f'the fields are {", ".join(table.column_names)}: set --text_field, or --id_field '
              '(None: the hash of the text decides between train and val)')
    if field not in table.column_names:
        raise UserError(f'record {documents + 1:,} has no field {field!r}; {remedy}')
    values = table[field].to_pylist()
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise UserError(f'record {documents + i + 1:,} has {value!r:.60} in the field {field!r}, '
                            f'which is no {"text" if kind is str else "id"}; {remedy}')
    return values


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
    tokenizer = load_tokenizer(tokenizer_name)


def encode(batch: list[tuple]) -> list[tuple]:
    """[(split, text)] -> [(split, ids with eos, bytes of the text)]."""
    dtype = np.uint16 if tokenizer.n_ids <= 2 ** 16 else np.uint32
    encode_text = tokenizer.encode_array or tokenizer.encode
    documents = []
    for split, text in batch:
        ids = np.asarray(encode_text(text), dtype)
        documents.append((split, np.append(ids, dtype(tokenizer.eos_id)), len(text.encode())))
    return documents


def worker_pool(s: Settings, tokenizer_name: str) -> ProcessPoolExecutor:
    """Processes that `encode`. To be started before the source, which may run threads: a fork copies none of them.

    A fork spares the workers the imports.
    """
    method = 'fork' if sys.platform == 'linux' else 'spawn'
    pool = ProcessPoolExecutor(s.workers, multiprocessing.get_context(method), start_worker, (tokenizer_name,))
    pool.submit(os.getpid)
    return pool


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

def save_progress(folder: Path, arguments: dict, writer: ShardWriter, position: dict) -> None:
    """Writes progress.json: the shards so far, where the source goes on, and what waits for each split's next shard."""
    pending = {}
    for split, parts in writer.pending.items():
        pending[split] = f'.pending_{split}_{position["documents"]}.bin'
        write_file(folder / pending[split], np.concatenate([np.empty(0, writer.dtype), *parts]).tobytes())
    write_json(folder / 'progress.json',
               {'arguments': arguments, 'splits': writer.splits, 'position': position, 'pending': pending})
    for path in folder.glob('.pending_*'):
        if path.name not in pending.values():
            path.unlink()


def load_progress(folder: Path, arguments: dict, tokenizer: Tokenizer, shard_tokens: int) -> tuple[ShardWriter, dict]:
    """(writer, position) of the run before, or of none; UserError if its arguments were others."""
    start = {'state': None, 'skip': 0, 'documents': 0}
    if not (folder / 'progress.json').exists():
        return ShardWriter(folder, tokenizer, shard_tokens), start
    saved = json.loads((folder / 'progress.json').read_text())
    for name, value in arguments.items():
        begun_with = saved['arguments'].get(name)
        if begun_with != value:
            raise UserError(f'{folder} was begun with {name} = {begun_with!r}, now it is {value!r}: use that, or '
                            'another --out_dir')
    dtype = ShardWriter(folder, tokenizer, shard_tokens).dtype
    pending = {split: np.fromfile(folder / file, dtype) for split, file in saved['pending'].items()}
    return ShardWriter(folder, tokenizer, shard_tokens, saved['splits'], pending), saved['position']


def keep_tokenizer(folder: Path, name: str) -> str:
    """Copies a tokenizer given by path into the data folder; returns what meta.json calls it."""
    if name in ('gpt2', 'byte'):
        return name
    path = Path(name)
    if path.is_dir():
        own_name = 'gpt2_vocabulary'
        copies = {path / file: folder / own_name / file for file in ('encoder.json', 'vocab.bpe')}
    else:
        own_name = 'tokenizer' + path.suffix
        copies = {path: folder / own_name}
    for source, target in copies.items():
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            write_file(target, source.read_bytes())
    return own_name


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
        left = [(self.max_tokens - tokens) / tokens_per_s] if self.max_tokens else []
        left += [(self.all_documents - documents) / documents_per_s] if self.all_documents else []
        eta = f' | ETA {datetime.timedelta(seconds=max(0, int(min(left))))}' if left else ''
        print(f'{documents:,} documents, {tokens:,} tokens | {documents_per_s:,.0f} documents/s, '
              f'{tokens_per_s:,.0f} tokens/s{eta}', flush=True)


# ---- main ----

def prepare(name: str, s: Settings) -> None:
    """Writes the data folder of a source, or goes on with it."""
    plain = re.sub(r'\W+', '_', Path(name).name.split('.')[0]).strip('_')
    folder = Path(s.out_dir) if s.out_dir else BUILT / (plain or 'files')
    if (folder / 'meta.json').exists():
        raise UserError(f'{folder} is complete (it has a meta.json): remove it first, or write to another --out_dir')
    tokenizer = load_tokenizer(s.vocab_dir if s.tokenizer == 'gpt2' and s.vocab_dir else s.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f'another process is writing to {folder}: wait for it, or use another --out_dir')
        arguments = {'source': name, **dataclasses.asdict(s)}
        for of_this_start in ('out_dir', 'workers', 'vocab_dir'):
            del arguments[of_this_start]
        writer, position = load_progress(folder, arguments, tokenizer, s.shard_tokens)
        if position['documents']:
            shards = sum(len(split['shards']) for split in writer.splits.values())
            print(f'{folder} has {shards} whole shards: going on after document {position["documents"]:,}')
        fill(folder, writer, name, s, arguments, position)
        writer.finish(keep_tokenizer(folder, tokenizer.name))
    for path in (folder / 'progress.json', folder / '.lock', *folder.glob('.pending_*')):
        path.unlink(missing_ok=True)
    for split, info in sorted(writer.splits.items()):
        print(f'{split}: {info["documents"]:,} documents, {info["tokens"]:,} tokens in {len(info["shards"])} shards')
    print(f'{folder} is ready: python train.py config/standard_xs.py --data={folder}')


def fill(folder: Path, writer: ShardWriter, name: str, s: Settings, arguments: dict, position: dict) -> None:
    """Reads the source from `position` on into the writer, until its end or max_tokens."""
    documents, tokens = position['documents'], sum(info['tokens'] for info in writer.splits.values())
    pool = worker_pool(s, writer.tokenizer.name)
    try:
        source = open_source(name, s)
        of_split = source.info.splits and source.info.splits.get(s.split)
        report = Report(s.max_tokens, of_split and of_split.num_examples, tokens, documents)
        for start, batch in encoded(pool, batches(source, s, position), AHEAD):
            for i, (split, ids, n_bytes) in enumerate(batch):
                if s.max_tokens is not None and tokens >= s.max_tokens:
                    return
                tokens += len(ids)
                documents += 1
                if writer.add(split, ids, n_bytes):
                    after_this = {**start, 'skip': start['skip'] + i + 1, 'documents': documents}
                    save_progress(folder, arguments, writer, after_this)
            report(tokens, documents)
    except BrokenProcessPool:
        raise UserError('a worker process was killed, perhaps for want of memory: start again with fewer --workers; '
                        'what is written stays')
    finally:
        pool.shutdown(cancel_futures=True)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if len(positional) > 1:
            raise UserError(f'one source is expected, got {len(positional)}: {" ".join(positional)}; '
                            "quote a pattern: 'texts/*.jsonl'")
        check_ranges(s, max_tokens=(1, inf), val_share=(0, 1), shard_tokens=(1, inf), workers=(1, 1024))
        prepare(positional[0] if positional else FINEWEB, s)


if __name__ == '__main__':
    main()
