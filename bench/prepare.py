"""Tokens/s of prepare_fineweb.py with one worker a core beside a plain loop of tiktoken in one process, on the same file.

    python -m bench.prepare FILE.jsonl.gz [FOLDER]     FOLDER has encoder.json and vocab.bpe, where tiktoken cannot download them
"""
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import write_results
from data.shards import Data
from data.tokenizers import load_tokenizer

ROUNDS = 3


def loop(file, folder, vocabulary):
    """The loop that one would write by hand: read, encode, append to a file."""
    tokenizer = load_tokenizer(vocabulary)
    with gzip.open(file, 'rt') as lines, open(folder / 'tokens.bin', 'wb') as out:
        for line in lines:
            out.write(np.array(tokenizer.encode(json.loads(line)['text']) + [tokenizer.eos_id], np.uint16).tobytes())


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit('bench.prepare: which file? python -m bench.prepare FILE.jsonl.gz [FOLDER with encoder.json and vocab.bpe]')
    file, vocabulary = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else 'gpt2'
    options = [f'--vocab_dir={vocabulary}'] if vocabulary != 'gpt2' else []
    ratios = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            start = time.perf_counter()
            loop(file, folder, vocabulary)
            middle = time.perf_counter()
            subprocess.run([sys.executable, 'prepare_fineweb.py', file, f'--out_dir={folder / "data"}', *options],
                           check=True, stdout=subprocess.DEVNULL)
            end = time.perf_counter()
            info = Data(folder / 'data').splits
            tokens = info['train']['tokens'] + info['val']['tokens']
            assert tokens == (folder / 'tokens.bin').stat().st_size // 2
            ratios.append((tokens, middle - start, end - middle))
    tokens, plain, ours = sorted(ratios, key=lambda r: r[1] / r[2])[ROUNDS // 2]
    write_results('prepare', [{'file': Path(file).name, 'tokens': tokens, 'loop_tokens_per_s': round(tokens / plain),
                               'ours_tokens_per_s': round(tokens / ours), 'ratio': round(plain / ours, 3)}])


if __name__ == '__main__':
    main()
