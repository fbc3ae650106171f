"""Tokens/s of prepare_fineweb.py, a worker a core, beside a plain loop of tiktoken in one process, on the same file.

    python -m bench.prepare FILE.jsonl.gz [FOLDER]     FOLDER has encoder.json and vocab.bpe, where tiktoken lacks them
    python -m bench.prepare --toy                      a small file, and bytes for tokens
"""
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench import progress, write_results
from data.shards import Data
from data.tokenizers import load_tokenizer


def loop(file, folder: Path, tokenizer_name: str) -> None:
    """The loop that one would write by hand: read, encode, append to a file."""
    tokenizer = load_tokenizer(tokenizer_name)
    with gzip.open(file, 'rt') as lines, open(folder / 'tokens.bin', 'wb') as out:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)['text']) + [tokenizer.eos_id]
            out.write(np.array(ids, np.uint16).tobytes())


def measure(file, tokenizer_name: str, options: list[str], folder: Path) -> tuple[int, float, float]:
    """(tokens, seconds of the loop, seconds of prepare_fineweb.py)."""
    start = time.perf_counter()
    loop(file, folder, tokenizer_name)
    middle = time.perf_counter()
    command = [sys.executable, 'prepare_fineweb.py', str(file), f'--out_dir={folder / "data"}', *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    end = time.perf_counter()
    info = Data(folder / 'data').splits
    tokens = info['train']['tokens'] + info['val']['tokens']
    assert tokens == (folder / 'tokens.bin').stat().st_size // 2
    return tokens, middle - start, end - middle


def compare(file, tokenizer_name: str, options: list[str], rounds: int) -> Iterator[dict]:
    figures = []
    for i in range(rounds):
        progress(f'round {i + 1} of {rounds}')
        with tempfile.TemporaryDirectory() as folder:
            figures.append(measure(file, tokenizer_name, options, Path(folder)))
    figures.sort(key=lambda figure: figure[1] / figure[2])
    tokens, plain, ours = figures[rounds // 2]
    yield {'file': Path(file).name, 'tokens': tokens, 'loop_tokens_per_s': round(tokens / plain),
           'ours_tokens_per_s': round(tokens / ours), 'ratio': round(plain / ours, 3)}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ['--toy']:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / 'toy.jsonl.gz'
            with gzip.open(file, 'wt') as lines:
                lines.writelines(json.dumps({'text': f'text {i}', 'id': str(i)}) + '\n' for i in range(500))
            options = ['--tokenizer=byte', '--val_share=0.1', '--workers=1']
            write_results('prepare', compare(file, 'byte', options, rounds=1), toy=True)
        return
    if len(argv) not in (1, 2) or argv[0].startswith('-'):
        sys.exit('bench.prepare: which file? python -m bench.prepare FILE.jsonl.gz [FOLDER with encoder.json '
                 'and vocab.bpe]')
    file, vocabulary = argv[0], argv[1] if len(argv) == 2 else 'gpt2'
    write_results('prepare', compare(file, vocabulary, [f'--tokenizer={vocabulary}'], rounds=3))


if __name__ == '__main__':
    main()
