"""Tokenize a Hugging Face dataset or local files into the shards that train.py reads.

    python prepare_fineweb.py --max_tokens=51e9                     FineWeb-Edu, for all SPS runs
    python prepare_fineweb.py 'texts/*.jsonl.gz' --tokenizer=tokenizer.json --out_dir=data/built/own
    python train.py config/standard_xs.py --data=data/built/own

Rerun the same command to continue after an interruption. See docs/data.md.
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import dataclasses
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lm_architectures.data.text.shards import BUILT
from lm_architectures.data.text.sources import Reading, Source, check_options
from lm_architectures.data.text.splits import fitting_split, split_documents
from lm_architectures.data.text.tokenizers import Tokenizer, load_tokenizer, tokenizer_digest
from lm_architectures.data.text.writing import ShardWriter, document_ids
from lm_architectures.files import ROOT, UserError, command, friendly_errors, locked, read_json, write_json
from lm_architectures.machine.devices import omp_threads, usable_cores
from lm_architectures.settings import check_ranges, load_settings

FINEWEB = 'HuggingFaceFW/fineweb-edu'
FINEWEB_SETTINGS = dict(  # official SPS code
    config='sample-350BT', val_fraction=0.0005, val_hash='md5', shuffle=200_000)
BATCH = 250  # documents of a batch, which a worker encodes; fewer if they are long
BATCH_CHARACTERS = 2 ** 22
BATCHES_PER_WORKER = 8  # in the queue, to keep workers busy while a shard is written


@dataclass
class Settings(Reading):
    out_dir: str = ''  # data folder to write; '': data/built/<source name>
    tokenizer: str = 'gpt2'  # gpt2, byte, a tokenizer.json, a SentencePiece .model, a folder of GPT-2's files
    bos: bool = False  # start each document with bos; every document ends with eos in any case
    max_tokens: int | None = None  # stop after the document that reaches this many tokens; None: read all
    shard_tokens: int = 100_000_000  # tokens per shard; a document is never split
    workers: int | None = None  # tokenizer threads; None: OMP_NUM_THREADS, or one per usable core


# ---- encoding in threads ----

def encoded(tokenizer: Tokenizer, documents: Iterator[tuple], workers: int) -> Iterator[tuple]:
    """Yield (next state, [[(split, ids, bytes of the text)]]) in order.

    The libraries encode in parallel, because they release Python's lock meanwhile.
    """
    waiting, pool = deque(), ThreadPoolExecutor(workers)
    try:
        for state, batch in batches(documents):
            waiting.append(pool.submit(encode, tokenizer, state, batch))
            if len(waiting) > BATCHES_PER_WORKER * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def batches(documents: Iterator[tuple]) -> Iterator[tuple]:
    """Group (next state, [(split, text)]) of records to (next state, list of records)."""
    batch, n_characters, state = [], 0, None
    for state, found in documents:
        batch.append(found)
        n_characters += sum(len(text) for _, text in found)
        if len(batch) == BATCH or n_characters >= BATCH_CHARACTERS:
            yield state, batch
            batch, n_characters = [], 0
    if batch:
        yield state, batch


def encode(tokenizer: Tokenizer, state: list, batch: list[list]) -> tuple[list, list[list]]:
    return state, [[(split, document_ids(tokenizer, text), len(text.encode())) for split, text in found]
                   for found in batch]


# ---- progress that survives a kill ----

def read_progress(folder: Path) -> dict | None:
    """Return the progress of an unfinished preparation, None for a folder without a full shard.

    UserError unless the folder is new, empty, or an unfinished preparation.
    """
    if (folder / 'meta.json').exists():
        raise UserError(f'{folder} is already complete (it has a meta.json): to prepare other data, remove it or '
                        'give another --out_dir')
    path, remedy = folder / 'progress.json', f'give another --out_dir, or remove {folder} if it holds nothing else'
    progress = read_json(path, remedy) if path.exists() else {}
    files = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(files - {'.lock', '.progress.json.writing'})
    if foreign and 'splits' not in progress:
        raise UserError(f'{folder} contains other files ({", ".join(foreign[:3])}): give a new or empty folder with '
                        '--out_dir')
    return progress if progress.get('splits') else None


def save_progress(progress: dict, writer: ShardWriter) -> None:
    """Write progress.json, from which a rerun continues."""
    writer.flush()
    write_json(writer.folder / 'progress.json', progress)


# ---- main ----

def prepare(name: str, s: Settings) -> None:
    """Write the data folder of a source, or continue writing it."""
    own_name = re.sub(r'\W+', '_', Path(name).name.split('.')[0]).strip('_') or 'files'
    folder = Path(s.out_dir or BUILT / own_name)
    tokenizer, source = load_tokenizer(s.tokenizer, s.bos), Source(name, s)
    check_options(source)
    read_progress(folder)  # an error before the lock file is written there
    with locked(folder):
        progress = unfinished(folder, {
            'source': name, **dataclasses.asdict(s), 'source_checksum': source.checksum,
            'tokenizer_checksum': tokenizer_digest(tokenizer.name)})
        if not progress['fitting_split']:
            progress['fitting_split'] = fitting_split(source, s.max_tokens)
        writer = ShardWriter(folder, tokenizer, s.shard_tokens, progress['splits'])
        save_progress(progress, writer)  # marks the folder as an unfinished preparation
        documents = split_documents(source, *progress['fitting_split'], progress['state'])
        workers = s.workers or omp_threads() or usable_cores()
        with closing(encoded(tokenizer, documents, workers)) as encoded_batches:
            fill(writer, encoded_batches, s.max_tokens, progress)
        writer.finish()
        (folder / 'progress.json').unlink()
    if progress['left_out']:
        print(f'{progress["left_out"]:,} records without text in field {s.text_field!r} were skipped')
    for split, info in sorted(writer.splits.items()):
        print(f'{split}: {info["documents"]:,} documents, {info["tokens"]:,} tokens in {len(info["shards"])} shards')
    print(f'{folder} is ready: {training_command(folder, writer.splits)}')


def unfinished(folder: Path, arguments: dict) -> dict:
    """Return the progress of a folder, or that of a new one. UserError if arguments differ."""
    arguments = {key: value for key, value in arguments.items() if key not in ('out_dir', 'workers')}
    saved = read_progress(folder)
    if saved is None:
        return {'arguments': arguments, 'fitting_split': None, 'splits': {}, 'state': None, 'left_out': 0}
    changed = [f'{key} = {saved["arguments"].get(key)!r} (now {now!r})' for key, now in arguments.items()
               if saved['arguments'].get(key) != now]
    if changed:
        raise UserError(f'{folder} was started with {", ".join(changed)}: restore these or change --out_dir')
    n_documents = sum(split['documents'] for split in saved['splits'].values())
    print(f'{folder}: checking the shards, then continuing after document {n_documents:,}', flush=True)
    return saved


def fill(writer: ShardWriter, batches: Iterator[tuple], max_tokens: int | None, progress: dict) -> None:
    """Write encoded batches until max_tokens. Saves progress at each full shard."""
    begin, start, last = writer.n_tokens, time.time(), time.time()
    for state, batch in batches:
        is_full = False
        for found in batch:
            if max_tokens is not None and writer.n_tokens >= max_tokens:
                return
            progress['left_out'] += not found
            for document in found:
                is_full |= writer.add(*document)
        if is_full:
            progress['state'] = state
            save_progress(progress, writer)
        if time.time() - last > 5:
            last = time.time()
            tokens_per_s = (writer.n_tokens - begin) / (last - start)
            print(f'{writer.n_tokens:,} tokens | {tokens_per_s:,.0f} tokens/s', flush=True)


def training_command(folder: Path, splits: dict) -> str:
    """Return a command that trains on the data, with model and block_size chosen for its size."""
    n_train, longest = splits['train']['tokens'], min(splits['train']['tokens'] // 2, splits['val']['tokens'] - 1)
    config = 'standard_xs' if n_train >= 10 ** 8 and longest >= 4096 else 'quickstart'
    shorter = [f'--block_size={longest}'] if longest < 256 else []
    return command('train.py', os.path.relpath(ROOT / f'config/{config}.py'), f'--data={folder}',
                   f'--out_dir=out/{folder.resolve().name}', *shorter)


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
                     val_fraction=(0, 0.999))
        prepare(name, s)


if __name__ == '__main__':
    main()
