"""Shared by the tests: a small data folder, and train.py run on it in a process of its own."""
import os
import random
import subprocess
import sys
from pathlib import Path

os.environ.setdefault('GOMP_SPINCOUNT', '1000')  # as train.py does, before torch

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

if not torch.cuda.is_available():  # Triton's kernels are then interpreted, in the tests that ask for it
    os.environ['TRITON_INTERPRET'] = '1'
import attn_kernels  # noqa: E402
from data import write_data  # noqa: E402
from data.tokenizers import load_tokenizer

attn_kernels.import_scan('gpn')  # and its kernels
os.environ.pop('TRITON_INTERPRET', None)
attn_kernels.KERNELS_ON_CPU = False

TINY = ['--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=32', '--batch_size=4', '--warmup_tokens=256', '--learning_rate=1e-2',
        '--eval_tokens=640', '--eval_interval=10', '--log_interval=1', '--save_interval=5', '--sample_tokens=0', '--threads=1',
        '--device=cpu', '--dtype=float32']
STEP_TOKENS = 4 * 32


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU'))])
def device(request):
    return request.param


@pytest.fixture
def kernels_device(monkeypatch):
    """Where Triton's kernels run: on a GPU if there is one, else in the interpreter."""
    if torch.cuda.is_available():
        return 'cuda'
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(attn_kernels, 'KERNELS_ON_CPU', True)
    return 'cpu'


@pytest.fixture(scope='session')
def tiny_data(tmp_path_factory):
    """A data folder of short made-up documents, byte tokens, several shards."""
    folder = tmp_path_factory.mktemp('data') / 'tiny'
    rng = random.Random(0)
    words = [''.join(rng.choices('abcdefgh', k=rng.randint(1, 6))) for _ in range(40)]
    documents = [('val' if i % 10 == 0 else 'train', ' '.join(rng.choices(words, k=rng.randint(3, 30)))) for i in range(300)]
    write_data(folder, load_tokenizer('byte'), documents, shard_tokens=5000)
    return folder


def run(*args, processes=1, **kwargs):
    """A script of the repository in a process of its own (torchrun's processes, if several)."""
    start = [sys.executable] if processes == 1 else [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    return subprocess.run([*start, *map(str, args)], capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=300, **kwargs)


def train_tiny(data, out, *args, steps=20, **kwargs):
    return run('train.py', *TINY, f'--data={data}', f'--out_dir={out}', f'--max_tokens={steps * STEP_TOKENS}', *args, **kwargs)


def assert_sentence(result, *parts):
    """Bad input: exit status 1, one sentence that names what is wrong, no traceback."""
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert 'Traceback' not in result.stderr, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr
