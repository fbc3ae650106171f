"""Tokenize a Hugging Face dataset or local files into the shards that train.py reads.

    python prepare_fineweb.py --max_tokens=51e9                     FineWeb-Edu, for all SPS runs
    python prepare_fineweb.py --max_tokens=2e9 --out_dir=data/built/fw2b
    python prepare_fineweb.py 'texts/*.jsonl.gz' --tokenizer=tokenizer.json
    python train.py config/standard_xs.py --data=data/built/fw2b

Rerun the same command to continue after an interruption. See docs/data.md.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.files import ROOT, UserError, command, friendly_errors, locked, read_json, sha256, write_json
from common.machine import omp_threads, usable_cores
from common.settings import check_ranges, load_settings
from data.shards import BUILT
from data.sources import fitting_share, open_source, with_splits
from data.tokenizers import TOKENIZER_FILES, load_tokenizer
from data.writing import ShardWriter, document_ids

FINEWEB = 'HuggingFaceFW/fineweb-edu'
FINEWEB_SETTINGS = dict(config='sample-350BT', val_share=0.0005, val_hash='md5', shuffle=200_000)  # official SPS code
MAX_PENDING_CHARS = 2 ** 27  # characters queued for the workers, to keep them busy while a shard is written


@dataclass
class Settings:
    out_dir: str = ''  # data folder to write; '': data/built/<source name>
    config: str | None = None  # dataset configuration; None: the only one. FineWeb-Edu: sample-350BT
    split: str = 'train'  # dataset split to read; train and val are both taken from it
    text_field: str = 'text'  # record field with the document's text
    id_field: str | None = 'id'  # record field hashed to pick train or val; None, .txt or records without id: the text
    split_lines: bool = False  # treat each line of a .txt file as a document, not the whole file
    split_at: str | None = None  # text that separates documents in a .txt file, such as <|endoftext|>
    tokenizer: str = 'gpt2'  # gpt2, byte, a tokenizer.json, a SentencePiece .model, a folder of GPT-2's files
    bos: bool = False  # start each document with bos; every document ends with eos in any case
    max_tokens: int | None = None  # stop after the document that reaches this many tokens; None: read all
    val_share: float = 0.001  # share of documents for validation; raised if that is too few. FineWeb-Edu: 0.0005
    val_hash: Literal['sha256', 'md5'] = 'sha256'  # hash of the id that chooses train or val. FineWeb-Edu: md5
    shuffle: int = 0  # documents per shuffle block (files are shuffled too); 0: no shuffling. FineWeb-Edu: 200,000
    shard_tokens: int = 100_000_000  # tokens per shard; a document is never split
    workers: int | None = None  # tokenizer processes; None: OMP_NUM_THREADS, or one per usable core


# ---- encoding in worker processes ----

def start_worker(tokenizer_name: str, bos: bool) -> None:
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=exit_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_name, bos)


def exit_with_parent() -> None:
    """Exit when the parent exits, even if it is killed: workers hold the lock of the folder too."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(batch: list[tuple | None]) -> list[tuple | None]:
    """Tokenize [(split, text)] to [(split, ids, bytes of the text)]; None stays None."""
    return [found and (found[0], document_ids(tokenizer, found[1]), len(found[1].encode())) for found in batch]


@contextmanager
def worker_pool(s: Settings, tokenizer_name: str) -> Iterator[ProcessPoolExecutor]:
    """Start the processes that run `encode`. Call it before the source starts threads."""
    method = 'fork' if sys.platform == 'linux' else 'spawn'  # forked workers need not repeat the imports
    workers = s.workers or omp_threads() or usable_cores()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), start_worker, (tokenizer_name, s.bos))
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for workers that are just starting
        pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pool
    except BrokenProcessPool:
        raise UserError('a worker process was killed, perhaps for lack of memory: rerun with fewer --workers')
    finally:
        pool.shutdown(cancel_futures=True)


def encoded(pool: ProcessPoolExecutor, batches: Iterator[tuple]) -> Iterator[tuple]:
    """Yield (next state, encoded batch) in order, with up to MAX_PENDING_CHARS in the queue."""
    waiting = deque()
    for state, batch in batches:
        n_characters = sum(len(found[1]) for found in batch if found)
        waiting.append((state, n_characters, pool.submit(encode, batch)))
        while sum(n for _, n, _ in waiting) > MAX_PENDING_CHARS:
            state, _, future = waiting.popleft()
            yield state, future.result()
    for state, _, future in waiting:
        yield state, future.result()


# ---- progress that survives a kill ----

def check_folder(folder: Path) -> None:
    """Raise UserError unless the folder is new, empty, or an unfinished preparation."""
    if (folder / 'meta.json').exists():
        raise UserError(f'{folder} is already complete (it has a meta.json): to prepare other data, remove it or '
                        'give another --out_dir')
    files = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(files - {'.lock', '.progress.json.writing'})
    if foreign and 'splits' not in (read_progress(folder) or {}):
        raise UserError(f'{folder} contains other files ({", ".join(foreign[:3])}): give a new or empty folder with '
                        '--out_dir')


def read_progress(folder: Path) -> dict | None:
    """Return progress.json of an unfinished preparation, None if there is none."""
    path, remedy = folder / 'progress.json', f'give another --out_dir, or remove {folder} if it holds nothing else'
    return read_json(path, remedy) if path.exists() else None


def save_progress(folder: Path, arguments: dict, writer: ShardWriter, state: dict | None, left_out: int) -> None:
    """Write progress.json, from which a rerun continues. state: see `open_source`."""
    writer.flush()
    write_json(folder / 'progress.json', {'arguments': arguments, 'splits': writer.splits, 'state': state,
                                          'left_out': left_out})


@contextmanager
def cleanup_on_failure(folder: Path) -> Iterator[None]:
    """If the preparation fails before its first full shard, delete what it has written."""
    check_folder(folder)  # check again, now that the folder is locked
    try:
        yield
    except BaseException:
        saved = read_progress(folder)
        if not (saved and saved['splits']) and not (folder / 'meta.json').exists():
            for pattern in (*TOKENIZER_FILES, 'train_*.bin', 'val_*.bin', '.*.writing', 'progress.json', '.lock'):
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not os.listdir(folder):
                folder.rmdir()
        raise


# ---- main ----

def prepare(name: str, s: Settings) -> None:
    """Write the data folder of a source, or continue writing it."""
    own_name = re.sub(r'\W+', '_', Path(name).name.split('.')[0]).strip('_') or 'files'
    folder = Path(s.out_dir or BUILT / own_name)
    check_folder(folder)  # before the lock file is written there
    tokenizer = load_tokenizer(s.tokenizer, s.bos)
    with locked(folder), cleanup_on_failure(folder), worker_pool(s, tokenizer.name) as pool:
        read, source_checksum = open_source(name, s)
        arguments = {'source': name, **dataclasses.asdict(s), 'source_checksum': source_checksum,
                     'tokenizer_checksum': sha256(tokenizer.name) if os.path.isfile(tokenizer.name) else None}
        del arguments['out_dir'], arguments['workers']
        saved = read_progress(folder)
        if saved and saved['splits']:
            val_share, by_text = saved['arguments'].pop('fitting_share')
            changed = [f'{key} = {saved["arguments"].get(key)!r} (now {now!r})' for key, now in arguments.items()
                       if saved['arguments'].get(key) != now]
            if changed:
                raise UserError(f'{folder} was started with {", ".join(changed)}: restore these or change --out_dir')
            n_documents = sum(split['documents'] for split in saved['splits'].values())
            print(f'{folder}: checking the shards, then continuing after document {n_documents:,}', flush=True)
        else:
            val_share, by_text = fitting_share(read, s, s.max_tokens)
            saved = {'splits': {}, 'state': None, 'left_out': 0}
        arguments['fitting_share'] = val_share, by_text
        writer = ShardWriter(folder, tokenizer, s.shard_tokens, saved['splits'])
        if not saved['splits']:
            save_progress(folder, arguments, writer, None, 0)  # marks the folder as an unfinished preparation
        batches = with_splits(read(saved['state']), val_share, by_text, s.val_hash)
        left_out = fill(writer, encoded(pool, batches), s.max_tokens, arguments, saved['left_out'])
        writer.finish()
        (folder / 'progress.json').unlink()
    if left_out:
        print(f'{left_out:,} records without text in field {s.text_field!r} were skipped')
    for split, info in sorted(writer.splits.items()):
        print(f'{split}: {info["documents"]:,} documents, {info["tokens"]:,} tokens in {len(info["shards"])} shards')
    print(f'{folder} is ready: {training_command(folder, writer.splits)}')


def fill(writer: ShardWriter, batches: Iterator[tuple], max_tokens: int | None, arguments: dict, left_out: int) -> int:
    """Write encoded batches until max_tokens. Returns the number of records without text."""
    begin, start, last = writer.n_tokens, time.time(), time.time()
    for state, batch in batches:
        is_full = False
        for document in batch:
            if max_tokens is not None and writer.n_tokens >= max_tokens:
                return left_out
            if document is None:
                left_out += 1
            else:
                is_full |= writer.add(*document)
        if is_full:
            save_progress(writer.folder, arguments, writer, state, left_out)
        if time.time() - last > 5:
            last = time.time()
            tokens_per_s = (writer.n_tokens - begin) / (last - start)
            print(f'{writer.n_tokens:,} tokens | {tokens_per_s:,.0f} tokens/s', flush=True)
    return left_out


def training_command(folder: Path, splits: dict) -> str:
    """Return a command that trains on the data, with model and block_size chosen for its size."""
    n_train, longest = splits['train']['tokens'], min(splits['train']['tokens'] // 2, splits['val']['tokens'] - 1)
    config = 'standard_xs' if n_train >= 10 ** 8 and longest >= 4096 else 'quickstart'
    window = [f'--block_size={longest}'] if longest < 256 else []
    return command('train.py', os.path.relpath(ROOT / f'config/{config}.py'), f'--data={folder}',
                   f'--out_dir=out/{folder.resolve().name}', *window)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, given = load_settings(Settings, argv)
        if len(positional) > 1:
            raise UserError(f'expected one source, got {len(positional)}: {" ".join(positional)}. To match several '
                            "files, quote the pattern: 'texts/*.jsonl'")
        name = positional[0] if positional else FINEWEB
        if name == FINEWEB:
            s = dataclasses.replace(s, **{key: value for key, value in FINEWEB_SETTINGS.items() if key not in given})
        check_ranges(s, max_tokens=(1, 10 ** 15), shard_tokens=(1, 10 ** 10), workers=(1, 1024), shuffle=(0, 10 ** 8),
                     val_share=(0, 1))
        prepare(name, s)


if __name__ == '__main__':
    main()
