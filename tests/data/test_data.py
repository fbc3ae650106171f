"""Data folders: writing, training order, validation windows, and damaged files."""
import itertools
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from hashlib import sha256

import filelock
import numpy as np
import pytest
import torch
from conftest import bit_flips, byte_documents, run, shard_ids, succeeded

from lm_architectures import data
from lm_architectures.data.tasks import python_docs
from lm_architectures.data.text import writing
from lm_architectures.data.text.shards import Data, shuffled
from lm_architectures.data.text.tokenizers import load_tokenizer, padded_vocab
from lm_architectures.data.text.writing import split_of
from lm_architectures.files import UserError


def test_padded_vocabulary_leaves_a_free_row():
    assert [padded_vocab(n) for n in (257, 32000, 50257, 64)] == [320, 32064, 50304, 128]


# ---- the order of training ----

def feistel(i, n, keys):
    """Permute one index, in plain Python integers."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for key in keys:
            mixed = (right + key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i


@pytest.mark.parametrize('n, first', [(1, 0), (7, 3), (1000, 980), (3_000_000_001, 5_999_999_990),
                                      (2 ** 41 + 1, 2 ** 41 - 20)])
def test_training_order_is_a_feistel_permutation_of_each_epoch(n, first):
    numbers = np.arange(first, first + 40)  # in several epochs
    windows, own = shuffled(numbers, n, seed=5)
    for i, window, number in zip(numbers.tolist(), windows.tolist(), own.tolist()):
        *keys, want = [int.from_bytes(sha256(f'5 {i // n} {j}'.encode()).digest()[:8], 'little') for j in range(5)]
        assert (window, number) == (feistel(i % n, n, keys), want)


def test_an_epoch_reads_every_window_once(tiny_data):
    d, T = Data(tiny_data), 32
    n, n_shards = d.n_rows('train', T), len(d.splits['train']['shards'])
    whole = shard_ids(tiny_data, 'train')
    assert n_shards > 2 and len(whole) == d.splits['train']['bytes'] + d.splits['train']['documents']
    windows = np.lib.stride_tricks.sliding_window_view(whole.astype(np.int64), T + 1)
    start_of = {window.tobytes(): start for start, window in reversed([*enumerate(windows)])}  # the first one
    orders, offsets = [], []
    for epoch in range(2):
        idx, targets = d.train_batch(epoch, n, T, seed=5)
        starts = [start_of[row.tobytes()] for row in torch.cat([idx, targets[:, -1:]], 1).numpy()]
        assert len(set(starts)) == n and len({s % T for s in starts}) == 1
        orders.append([s // T for s in starts])
        offsets.append(starts[0] % T)
    assert orders[0] != orders[1] and offsets[0] != offsets[1]


# ---- validation ----

def test_validation_windows_are_random_with_a_seed_and_in_order_without(tiny_data):
    d, T, n = Data(tiny_data), 32, 200
    whole = shard_ids(tiny_data, 'val').astype(np.int64)
    idx, targets = d.val_batch(range(n), T, seed=42)
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    starts = {whole[i:i + T + 1].tobytes(): i for i in range(len(whole) - T)}
    found = [starts[row.tobytes()] for row in torch.cat([idx, targets[:, -1:]], 1).numpy()]
    assert len({i % T for i in found}) > T // 2 and len(set(found)) < n  # with replacement
    assert max(found) - min(found) > 0.9 * (len(whole) - T)
    assert torch.equal(d.val_batch([7, 3], T, seed=42)[0], idx[[7, 3]])  # does not depend on the other windows read
    assert not torch.equal(d.val_batch(range(n), T, seed=43)[0], idx)
    in_order = d.val_batch(range(3), T)[0]
    assert in_order.flatten().tolist() == whole[:3 * T].tolist()


@pytest.mark.slow
def test_embedded_data_is_deterministic_deduplicated_and_split_by_hash(tmp_path):
    """Another process builds the same in the folder that BUILT_DATA names."""
    code = 'from lm_architectures.data import open_data; print("in", open_data("python_docs").folder)'
    succeeded(run('-c', code, env={**os.environ, 'BUILT_DATA': str(tmp_path)}))
    first = dict.fromkeys(itertools.islice(python_docs.texts(), 200))
    found = {name: byte_documents(tmp_path / 'python_docs', name) for name in ('train', 'val')}
    for name, texts in found.items():
        same = [text for text in first if split_of(text) == name]
        assert texts[:len(same)] == same and len({*texts}) == len(texts) and {*map(split_of, texts)} == {name}
    n_bytes = {name: sum(len(text.encode()) for text in texts) for name, texts in found.items()}
    assert 1.5e6 < n_bytes['train'] < 4e6 and n_bytes['val'] > 3e4


def test_concurrent_runs_build_data_once(tiny_data, tmp_path, monkeypatch):
    """A second run waits for the lock and then reads the data built by the first, or builds it."""
    monkeypatch.setattr(data, 'BUILT', tmp_path)
    monkeypatch.setattr(python_docs, 'documents', lambda: (pytest.fail('built twice') for _ in range(1)))
    lock = filelock.FileLock(tmp_path / '.lock')
    with ThreadPoolExecutor() as pool:
        with lock:
            waiting = pool.submit(data.open_data, 'python_docs')
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            shutil.copytree(tiny_data, tmp_path / 'python_docs')
        assert waiting.result().sha256 == Data(tiny_data).sha256
    (tmp_path / 'python_docs').rename(tmp_path / '.python_docs.writing')  # as left by a builder that was killed
    monkeypatch.setattr(python_docs, 'documents', lambda: [('train', 'a text'), ('val', 'another')])
    data.open_data('python_docs')
    assert {path.name for path in tmp_path.iterdir()} == {'python_docs', '.lock'}


# ---- damage ----

@pytest.fixture
def copy(tiny_data, tmp_path):
    return shutil.copytree(tiny_data, tmp_path / 'copy')


@pytest.mark.parametrize('content, is_open, sentence', [
    (b'short', False, '{shard} has 5 bytes, expected'), (None, False, '{shard} is missing'),
    (b'short', True, '{shard} was cut while it was in use'),
    (b'\xff' * 20_000, False, 'contains id 65535, but its tokenizer')])
def test_a_damaged_shard_gives_a_clear_error(copy, content, is_open, sentence):
    shard, d = copy / 'train_00001.bin', Data(copy)
    size = shard.stat().st_size
    shard.unlink()
    if content:
        shard.write_bytes(content[:size])
    with pytest.raises(UserError, match=re.escape(sentence.format(shard=shard))):
        (d if is_open else Data(copy)).tokens('train', 0, d.splits['train']['tokens'])


def test_verify_finds_a_flipped_bit_in_a_shard(copy):
    shards = [*copy.glob('*.bin')]
    for shard in shards:
        for place in bit_flips(shard, -(-100 // len(shards))):
            with pytest.raises(UserError, match=f'{shard.name} does not match its checksum'):
                Data(copy).verify()
                raise AssertionError(f'{place} was not detected')
    Data(copy).verify()


@pytest.mark.parametrize('name, value', [('n_ids', 0), ('eos_id', 257), ('dtype', 'int8'), ('tokenizer', '../byte'),
                                         ('splits', {}), ('splits', [1]), ('tokenizer', None)])
def test_a_bad_value_in_meta_json_gives_a_clear_error(copy, name, value):
    meta = json.loads((copy / 'meta.json').read_text())
    (copy / 'meta.json').write_text(json.dumps(meta | {name: value}))
    with pytest.raises(UserError, match='meta.json is damaged'):
        Data(copy)


# ---- writing ----

def test_writing_never_replaces_data_and_is_all_or_nothing(tiny_data, tmp_path):
    def interrupted():
        yield 'train', 'text'
        raise KeyboardInterrupt
    byte = load_tokenizer('byte')
    with pytest.raises(OSError, match='not empty'):
        writing.write_data(tiny_data, byte, [('train', 'a'), ('val', 'b')])
    with pytest.raises(UserError, match='bytes of text, val 0'):
        writing.write_data(tmp_path / 'x', byte, [('train', 'a')])
    with pytest.raises(KeyboardInterrupt):
        writing.write_data(tmp_path / 'x', byte, interrupted())
    assert list(tmp_path.iterdir()) == []
