"""Data folders: what is written, the order it is read in, and the sentence when it is damaged."""
import json
import os
import random
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_sentence, run

import data
from common.files import UserError
from common.validation import validation_loss
from data import python_docs, shards
from data.shards import Data, epoch_keys, permute, shuffled
from data.tokenizers import load_tokenizer, padded_vocab


def stream(folder, split):
    """The ids of a split, all its shards one after the other, read without Data."""
    return np.concatenate([np.fromfile(path, '<u2') for path in sorted(folder.glob(f'{split}_*.bin'))])


def test_padded_vocabulary_leaves_a_free_row():
    assert [padded_vocab(n) for n in (257, 32000, 50257, 64)] == [320, 32064, 50304, 128]


def test_byte_tokenizer_round_trips():
    tokenizer = load_tokenizer('byte')
    text = 'naïve 日本\n'
    assert tokenizer.decode(tokenizer.encode(text) + [tokenizer.eos_id]).decode() == text


@pytest.mark.parametrize('n', [1, 2, 3, 17, 64, 1000])
def test_permutation_visits_every_index_once(n):
    orders = [permute(np.arange(n), n, [key, 2, 3, 4]).tolist() for key in (1, 9)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert n < 17 or orders[0] != orders[1]


def test_the_order_of_training_is_that_of_older_code():
    """Which went through the network one index at a time, in Python's numbers."""
    def of_one(i, n, keys):
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
    for n, first in ((1, 0), (7, 3), (1000, 980), (3_000_000_001, 5_999_999_990), (2 ** 41 + 1, 2 ** 41 - 20)):
        numbers = np.arange(first, first + 40)  # of several epochs
        windows, own = shuffled(numbers, n, seed=5)
        for i, window, number in zip(numbers.tolist(), windows.tolist(), own.tolist()):
            *keys, want = epoch_keys(5, i // n)
            assert (window, number) == (of_one(i % n, n, keys), want)


def test_shards_read_as_one_stream(tiny_data):
    d = Data(tiny_data)
    assert len(d.shards['train']) > 2
    whole = stream(tiny_data, 'train')
    assert (d.tokens('train', 4990, 6000) == whole[4990:10990]).all()
    assert d.splits['train']['tokens'] == len(whole) == d.splits['train']['bytes'] + d.splits['train']['documents']


def test_an_epoch_reads_every_window_once(tiny_data):
    d, T = Data(tiny_data), 32
    n = d.n_windows('train', T)
    whole = stream(tiny_data, 'train')
    windows = np.lib.stride_tricks.sliding_window_view(whole.astype(np.int64), T + 1)
    start_of = {window.tobytes(): start for start, window in reversed([*enumerate(windows)])}  # the first of equal ones
    orders, offsets = [], []
    for epoch in range(2):
        idx, targets = d.train_batch(epoch, n, T, seed=5)
        starts = [start_of[row.tobytes()] for row in torch.cat([idx, targets[:, -1:]], 1).numpy()]
        assert len(set(starts)) == n and len({s % T for s in starts}) == 1
        orders.append([s // T for s in starts])
        offsets.append(starts[0] % T)
    assert orders[0] != orders[1] and offsets[0] != offsets[1]


def test_batches_depend_on_seed_and_step_only(tiny_data):
    d = Data(tiny_data)
    idx, targets = d.train_batch(7, 8, 32, seed=1)
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    parts = [d.train_batch(7, 8, 32, 1, slice(a, b))[0] for a, b in ((0, 3), (3, 8))]
    assert torch.equal(torch.cat(parts), idx)
    assert not torch.equal(d.train_batch(7, 8, 32, seed=2)[0], idx)


# ---- validation ----

def test_validation_windows_lie_at_random_offsets_by_a_seed_or_in_order(tiny_data):
    d, T, n = Data(tiny_data), 32, 200
    whole = stream(tiny_data, 'val').astype(np.int64)
    idx, targets = d.val_batch(range(n), T, seed=42)
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    starts = {whole[i:i + T + 1].tobytes(): i for i in range(len(whole) - T)}
    found = [starts[row.tobytes()] for row in torch.cat([idx, targets[:, -1:]], 1).numpy()]
    assert len({i % T for i in found}) > T // 2 and len(set(found)) < n  # with replacement
    assert max(found) - min(found) > 0.9 * (len(whole) - T)
    assert torch.equal(d.val_batch([7, 3], T, seed=42)[0], idx[[7, 3]])  # whoever reads them
    assert not torch.equal(d.val_batch(range(n), T, seed=43)[0], idx)
    in_order = d.val_batch(range(3), T)[0]
    assert in_order.flatten().tolist() == whole[:3 * T].tolist()


@pytest.mark.parametrize('n_tokens, seed, want', [
    (320, 42, 'random'), (320, None, 'first'), (10 ** 7, 42, 'all'), (None, 42, 'all'), (0, None, 'one')])
def test_a_validation_loss_is_of_so_many_tokens_and_of_all_in_order_where_there_are_fewer(tiny_data, n_tokens, seed,
                                                                                          want):
    d, T, seen = Data(tiny_data), 32, []

    def model(idx, targets):
        seen.extend(idx.tolist())
        mean = idx.double().mean()
        return {'loss': 3 * mean, 'nll': mean, 'kl': 2 * mean}
    model.config = SimpleNamespace(eos_id=None)
    parts, n_counted = validation_loss(model, d, T, n_tokens, seed, 3, 'cpu')
    n = {'all': d.n_windows('val', T), 'one': 1}.get(want, 10)
    assert seen == d.val_batch(range(n), T, 42 if want == 'random' else None)[0].tolist()
    assert n_counted == n * T
    mean = np.mean(seen)
    assert parts == pytest.approx({'loss': 3 * mean, 'nll': mean, 'kl': 2 * mean})


@pytest.mark.slow
def test_embedded_data_is_deduplicated_and_split_by_hash(tmp_path):
    python_docs.build(tmp_path / 'a')
    splits = Data(tmp_path / 'a').splits
    assert 1.5e6 < splits['train']['tokens'] < 4e6 and splits['val']['tokens'] > 3e4
    texts = {split: bytes(min(i, 255) for i in stream(tmp_path / 'a', split)).split(b'\xff')
             for split in ('train', 'val')}
    assert not set(texts['train'][:-1]) & set(texts['val'][:-1])
    assert len(set(texts['train'][:-1])) == splits['train']['documents']


def test_embedded_data_is_deterministic(tmp_path, monkeypatch):
    """On a part of the library, as reading all of it takes seconds."""
    library = tmp_path / 'library'
    for name in ('json', 'email', 'unittest'):
        shutil.copytree(Path(sysconfig.get_paths()['stdlib']) / name, library / name)
    monkeypatch.setattr(python_docs.sysconfig, 'get_paths', lambda: {'stdlib': str(library)})
    for name in ('a', 'b'):
        python_docs.build(tmp_path / name)
    assert (tmp_path / 'a/meta.json').read_text() == (tmp_path / 'b/meta.json').read_text()


def test_a_folder_of_texts_is_data(tmp_path, monkeypatch):
    monkeypatch.setattr(data, 'BUILT', tmp_path / 'built')
    (tmp_path / 'texts/more').mkdir(parents=True)
    texts = [''.join(f'Line {i} of text {n} that is not long.\n' for i in range(1 + n % 7)) for n in range(400)]
    for n, text in enumerate(texts):
        (tmp_path / 'texts' / ('more' if n % 2 else '') / f'{n}.txt').write_text(text)
    d = data.open_data(str(tmp_path / 'texts'))
    ids = [*stream(d.folder, 'train'), *stream(d.folder, 'val')]
    assert sorted(bytes(min(i, 255) for i in ids).decode('latin1').split('\xff')[:-1]) == sorted(texts)
    assert d.splits['val']['documents'] >= 10 and d.splits['train']['documents'] > 300
    assert data.open_data(str(tmp_path / 'texts')).sha256 == d.sha256 and len(list((tmp_path / 'built').iterdir())) == 1
    (tmp_path / 'texts/0.txt').write_text('Another text.')  # and so other data
    assert data.open_data(str(tmp_path / 'texts')).sha256 != d.sha256 and len(list((tmp_path / 'built').iterdir())) == 2


def test_two_runs_that_start_at_once_build_the_same_data(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, 'BUILT', tmp_path)

    def build(folder):
        shutil.copytree(tiny_data, folder)  # the other process is done by now
        shards.write_data(folder, load_tokenizer('byte'), [('train', 'a'), ('val', 'b')])
    monkeypatch.setattr(python_docs, 'build', build)
    assert data.open_data('python_docs').sha256 == Data(tiny_data).sha256

    def failing(folder):
        raise UserError('no text')
    monkeypatch.setattr(python_docs, 'build', failing)
    monkeypatch.setattr(data, 'BUILT', tmp_path / 'other')
    with pytest.raises(UserError, match='no text'):
        data.open_data('python_docs')


@pytest.fixture
def copy(tiny_data, tmp_path):
    return shutil.copytree(tiny_data, tmp_path / 'copy')


def test_damaged_data_is_a_sentence(copy):
    def expect(sentence, act):
        with pytest.raises(UserError) as error:
            act()
        assert sentence in str(error.value)

    shard = copy / 'train_00001.bin'
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    expect(f'{shard} has {len(whole) - 2} bytes, meta.json says {len(whole)}', lambda: Data(copy))
    shard.unlink()
    expect(f'{shard} is missing', lambda: Data(copy))
    shard.write_bytes(whole[:-2] + b'a\0' if whole[-2:] != b'a\0' else whole[:-2] + b'b\0')
    expect(f'{shard} does not match its checksum', Data(copy).verify)
    shard.write_bytes(b'\xff\xff' * (len(whole) // 2))
    shard.with_suffix('.crc32').unlink()  # as in a folder of older code
    expect('holds id 65535, but its tokenizer has only 257 ids', lambda: Data(copy).tokens('train', 0, 10000))
    meta = copy / 'meta.json'
    meta.write_text(meta.read_text()[:50])
    expect(f'{copy}/meta.json is damaged', lambda: Data(copy))
    expect('no data at python_dogs (did you mean', lambda: data.open_data('python_dogs'))
    expect('no data at nowhere: expected a .txt file, a folder with meta.json or with .txt files, or built-in data '
           '(a5, countdown, manhattan, path_star, pointer_chasing, python_docs, recall)',
           lambda: data.open_data('nowhere'))


def flip_bit(path, rng):
    """One bit of a file, at random."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_of_a_shard_is_found_when_its_mib_is_first_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, 'MIB', 1000)  # a shard of 10,000 bytes then has ten
    documents = [(split, 'abcdefghi' * 60) for split in ('train', 'val') * 20]
    shards.write_data(tmp_path / 'data', load_tokenizer('byte'), documents, shard_tokens=5000)
    shard, rng = tmp_path / 'data/train_00001.bin', random.Random(0)
    whole, n_before = shard.read_bytes(), Data(tmp_path / 'data').starts['train'][1]
    for _ in range(100):
        flip_bit(shard, rng)
        place = next(i for i, (old, new) in enumerate(zip(whole, shard.read_bytes())) if old != new)
        begin, end = place // 1000 * 1000, min(place // 1000 * 1000 + 1000, len(whole))
        d = Data(tmp_path / 'data')
        with pytest.raises(UserError, match=f'train_00001.bin is damaged between byte {begin} and byte {end},'):
            d.tokens('train', n_before + place // 2, 1)
        if begin:
            d.tokens('train', 0, n_before + begin // 2)  # all before that piece
        with pytest.raises(UserError, match=f'train_00001.bin is damaged between byte {begin} and byte {end},'):
            d.tokens('train', 0, d.splits['train']['tokens'])
        shard.write_bytes(whole)
    checksums = shard.with_suffix('.crc32')
    checksums.write_bytes(checksums.read_bytes()[:-6] + bytes(6))
    with pytest.raises(UserError, match='train_00001.crc32 is damaged'):
        Data(tmp_path / 'data')


def test_a_shard_that_is_shortened_while_it_is_read_is_a_sentence(copy):
    d = Data(copy)
    d.tokens('train', 0, 3000)
    os.truncate(copy / 'train_00000.bin', 5000)
    d.tokens('train', 0, 2500)
    with pytest.raises(UserError, match=r'train_00000.bin has 5000 bytes and had \d+: it was shortened'):
        d.tokens('train', 0, 2501)


def test_folders_of_older_code_are_read_and_one_line_says_that_only_sizes_are_checked(copy, tiny_data, capsys):
    want = Data(tiny_data)
    assert capsys.readouterr().err == ''
    for path in copy.glob('*.crc32'):
        path.unlink()
    meta = json.loads((copy / 'meta.json').read_text())
    meta.pop('crc32', None)
    meta['tokenizer'] = '/elsewhere/tokenizer.json'  # `write_data` did not copy it
    (copy / 'meta.json').write_text(json.dumps(meta))
    d = Data(copy)
    assert d.tokenizer == '/elsewhere/tokenizer.json'
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and 'shards have no checksums of their pieces' in message and '--verify' in message
    n = d.splits['train']['tokens']
    assert d.sha256 == want.sha256 and (d.tokens('train', 0, n) == want.tokens('train', 0, n)).all()


def test_few_files_stay_open_and_none_after_the_data(tiny_data, monkeypatch):
    def open_files():
        return [path for path in (os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd'))
                if path.startswith(str(tiny_data))]
    monkeypatch.setattr(shards, 'KEPT_OPEN', 2)
    d = Data(tiny_data)
    assert open_files() == []
    ids = d.tokens('train', 0, d.splits['train']['tokens'])
    assert len(d.shards['train']) > 2 and (ids == stream(tiny_data, 'train')).all() and len(open_files()) == 2
    del d
    assert open_files() == []


@pytest.mark.parametrize('path, value', [
    *(((name,), value) for name in ('tokenizer', 'n_ids', 'eos_id', 'dtype', 'splits')
      for value in (None, [], -1, 'x/y')),
    (('n_ids',), 2 ** 40), (('n_ids',), True), (('eos_id',), 257), (('tokenizer',), '../byte'), (('dtype',), 'int8'),
    *((('splits', 'val', name), value) for name in ('tokens', 'documents', 'bytes')
      for value in (0, -1, 1.5, '7', None)),
    *((('splits', 'val', 'shards'), value) for value in (None, {}, [], [5], [{}])),
    *((('splits', 'val', 'shards', 0, 'file'), value)
      for value in ('../val_00000.bin', '/etc/passwd', 'a/b', '..', '.', '', 'a\0b', '\ud800', 'a' * 300, 5)),
    *((('splits', 'val', 'shards', 0, 'tokens'), value) for value in (0, -5, '5', 10 ** 40)),
    *((('splits', 'val', 'shards', 0, 'sha256'), value) for value in (None, 5, 'abc')),
])
def test_wrong_types_and_values_in_meta_json_are_sentences(copy, path, value):
    meta = json.loads((copy / 'meta.json').read_text())
    meta.pop('crc32', None)
    inner = meta
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (copy / 'meta.json').write_text(json.dumps(meta))
    with pytest.raises(UserError, match='meta.json is damaged .* cannot be '):
        Data(copy)


@pytest.mark.parametrize('text', ['', '5', '[]', 'null', '[' * 100_000, '{"n_ids": ' + '9' * 5000, '\0', '{}'])
def test_what_is_no_meta_json_is_a_sentence(copy, text):
    (copy / 'meta.json').write_text(text)
    with pytest.raises(UserError, match='meta.json is damaged '):
        Data(copy)


@pytest.mark.parametrize('umask', [0o022, 0o007])
def test_a_data_folder_has_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        shards.write_data(tmp_path / 'data', load_tokenizer('byte'), [('train', 'a'), ('val', 'b')])
    finally:
        os.umask(before)
    assert (tmp_path / 'data').stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / 'data').iterdir()} == {0o666 & ~umask}


def test_writing_never_replaces_data_and_needs_both_splits(tiny_data, tmp_path):
    with pytest.raises(UserError, match='exists: remove it first'):
        shards.write_data(tiny_data, load_tokenizer('byte'), [('train', 'a'), ('val', 'b')])
    with pytest.raises(UserError, match="expected documents for 'train' and for 'val'"):
        shards.write_data(tmp_path / 'x', load_tokenizer('byte'), [('train', 'a')])
    assert not (tmp_path / 'x').exists()


def test_a_failed_write_leaves_nothing(tmp_path):
    def documents():
        yield 'train', 'text'
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        shards.write_data(tmp_path / 'x', load_tokenizer('byte'), documents())
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_trained_to_a_size_and_gives_texts_back(tmp_path):
    text = 'Träume aus Glas, dreams of glass, 夢. ' * 20 + ' '.join(f'word{i}' for i in range(200))
    (tmp_path / 'a.jsonl').write_text(json.dumps({'text': text}) + '\n')
    result = run('-m', 'data.tokenizers', tmp_path / 'a.jsonl', '--vocab_size=300', f'--out={tmp_path / "bpe.json"}')
    assert result.returncode == 0 and 'has 300 ids' in result.stdout, result.stderr
    tokenizer = load_tokenizer(tmp_path / 'bpe.json')
    assert tokenizer.n_ids == 300 and tokenizer.decode(tokenizer.encode(text)).decode() == text
    assert len(tokenizer.encode(text)) < 0.6 * len(text.encode())
    again = run('-m', 'data.tokenizers', tmp_path / 'a.jsonl', f'--out={tmp_path / "bpe.json"}')
    assert_sentence(again, 'exists: write to another --out')
    (tmp_path / 'a.jsonl.gz').write_bytes(b'compressed')
    for name in ('a.jsonl.gz', '.', 'none.txt'):
        result = run('-m', 'data.tokenizers', tmp_path / name, f'--out={tmp_path / "c.json"}')
        assert_sentence(result, 'is no text file')
    (tmp_path / 'b.jsonl').write_text('{"text": "a"}\n{"words": "b"}\n')
    assert_sentence(run('-m', 'data.tokenizers', tmp_path / 'b.jsonl', f'--out={tmp_path / "c.json"}'), 'line 2')
