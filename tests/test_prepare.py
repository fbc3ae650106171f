"""prepare_fineweb.py on small files that the tests write: every kind of source, killed and resumed, any number of
workers."""
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_sentence, run

from common.files import UserError
from data.shards import Data, split_of
from data.tokenizers import load_tokenizer

datasets = pytest.importorskip('datasets')
pytestmark = pytest.mark.slow
FAST = ['--tokenizer=byte', '--val_share=0.1']


@pytest.fixture(scope='module')
def records():
    rng = random.Random(0)
    return [{'text': ' '.join(rng.choices(['naïve', 'a', 'Hund', '日本', '\n'], k=rng.randint(1, 300))),
             'id': f'<urn:{i}>', 'score': i / 7}
            for i in range(3000)]


@pytest.fixture(scope='module')
def fineweb(records, tmp_path_factory):
    """A dataset folder in the layout of FineWeb-Edu: configurations named in README.md, parquet files of each."""
    import pyarrow
    import pyarrow.parquet
    folder = tmp_path_factory.mktemp('hub') / 'fineweb-edu'
    (folder / 'sample/100BT').mkdir(parents=True)
    (folder / 'README.md').write_text('---\nconfigs:\n- config_name: sample-100BT\n  data_files:\n  - split: train\n'
                                      '    path: sample/100BT/*\n---\n')
    for i in range(3):
        table = pyarrow.Table.from_pylist(records[i * 1000:(i + 1) * 1000])
        pyarrow.parquet.write_table(table, folder / f'sample/100BT/{i:03d}_00000.parquet', row_group_size=300)
    return folder


@pytest.fixture(scope='module')
def prepared(fineweb, tmp_path_factory):
    """Data made from it in one go, by one worker."""
    out = tmp_path_factory.mktemp('prepared') / 'data'
    result = run('prepare_fineweb.py', fineweb, *FAST, '--config=sample-100BT', f'--out_dir={out}',
                 '--shard_tokens=100_000', '--workers=1')
    assert result.returncode == 0, result.stderr
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != '.lock'}


def documents(folder, split):
    ids = np.concatenate([np.fromfile(path, '<u2') for path in sorted(folder.glob(f'{split}_*.bin'))])
    return bytes(min(i, 255) for i in ids).split(b'\xff')[:-1]


def test_a_streamed_dataset_becomes_shards(prepared, records):
    for split in ('train', 'val'):
        assert documents(prepared, split) == [r['text'].encode() for r in records if split_of(r['id'], 0.1) == split]
    d = Data(prepared)
    d.verify()
    assert len(d.shards['train']) > 5
    shards = {shard['file'] for info in d.splits.values() for shard in info['shards']}
    assert contents(prepared).keys() == {'meta.json', *shards, *(shard.replace('.bin', '.crc32') for shard in shards)}


@pytest.mark.parametrize('n_kills', [2, pytest.param(6, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(prepared, fineweb, tmp_path, n_kills):
    rng, out, kills = random.Random(1), tmp_path / 'data', 0
    args = ['prepare_fineweb.py', str(fineweb), *FAST, '--config=sample-100BT', f'--out_dir={out}',
            '--shard_tokens=100_000']
    while kills < n_kills:
        before = len(list(out.glob('*.bin')))
        process = subprocess.Popen([sys.executable, *args, f'--workers={rng.randint(1, 3)}'], cwd=ROOT,
                                   start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob('*.bin'))) < before + 1:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        if (out / 'meta.json').exists():
            break
    assert kills >= 2
    if not (out / 'meta.json').exists():
        assert_sentence(run(*args, '--val_share=0.2'), 'was begun with val_share = 0.1, now it is 0.2')
        result = run(*args)
        assert result.returncode == 0 and 'going on after document' in result.stdout, result.stderr
    assert contents(out) == contents(prepared)


def test_local_files_and_a_limit(records, tmp_path):
    with gzip.open(tmp_path / 'a.jsonl.gz', 'wt') as file:
        file.writelines(json.dumps({'body': r['text'], 'n': i}) + '\n' for i, r in enumerate(records[:500]))
    result = run('prepare_fineweb.py', tmp_path / '*.jsonl.gz', *FAST, f'--out_dir={tmp_path}/json',
                 '--text_field=body', '--id_field=n', '--max_tokens=30_000')
    assert result.returncode == 0, result.stderr
    splits = Data(tmp_path / 'json').splits
    tokens = sum(info['tokens'] for info in splits.values())
    assert 30_000 <= tokens < 33_000
    taken = records[:sum(info['documents'] for info in splits.values())]
    assert documents(tmp_path / 'json', 'train') == [r['text'].encode() for i, r in enumerate(taken)
                                                     if split_of(str(i), 0.1) == 'train']

    for i in range(40):
        (tmp_path / f'{i:02d}.txt').write_text(f'Text {i}.\nOf two lines.')
    result = run('prepare_fineweb.py', tmp_path / '*.txt', *FAST, f'--out_dir={tmp_path}/txt', '--id_field=None')
    assert result.returncode == 0, result.stderr
    assert sorted(documents(tmp_path / 'txt', 'train') + documents(tmp_path / 'txt', 'val')) == sorted(
        f'Text {i}.\nOf two lines.'.encode() for i in range(40))


def test_bad_input_is_a_sentence(prepared, fineweb, tmp_path):
    prepare = lambda *args: run('prepare_fineweb.py', *args, *FAST, f'--out_dir={tmp_path}/out')
    assert_sentence(prepare(fineweb, '--text_field=body'), "record 1 has no field 'body'", 'the fields are text, id, score')
    (tmp_path / 'bad.jsonl').write_text('{"text": "a", "id": 1}\n{"text": null, "id": 2}\n')
    assert_sentence(prepare(tmp_path / 'bad.jsonl'), "record 2 (", "bad.jsonl, line 2) has None in field 'text'")
    (tmp_path / 'cut.jsonl').write_text('{"text": "a", "id": 1}\n{"text": "b", "i\n')
    assert_sentence(prepare(tmp_path / 'cut.jsonl'), 'cut.jsonl cannot be read after line 1 (JSONDecodeError')
    assert_sentence(prepare(tmp_path / 'none*.parquet'), 'no file matches')
    assert_sentence(run('prepare_fineweb.py', fineweb, f'--out_dir={prepared}'), 'is complete')
    offline = {k: v for k, v in os.environ.items()
               if k != 'TIKTOKEN_CACHE_DIR'} | {'TIKTOKEN_CACHE_DIR': str(tmp_path / 'empty'),
                                                'HTTPS_PROXY': 'http://127.0.0.1:9'}
    assert_sentence(run('prepare_fineweb.py', fineweb, f'--out_dir={tmp_path}/gpt2', env=offline), 'TIKTOKEN_CACHE_DIR',
                    '--vocab_dir')
    assert_sentence(run('prepare_fineweb.py', fineweb, f'--out_dir={tmp_path}/gpt2', f'--vocab_dir={tmp_path}'),
                    'encoder.json is missing', 'sha256')


def train_tokenizers(folder, texts):
    """A byte-level BPE tokenizer.json and a SentencePiece .model, small ones."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=['<|endoftext|>'],
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast.save(str(folder / 'own.json'))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(folder / 'own'),
                                             vocab_size=300, byte_fallback=True,
                                             hard_vocab_limit=False, minloglevel=2, normalization_rule_name='identity',
                                             remove_extra_whitespaces=False)
    return [folder / 'own.json', folder / 'own.model']


def test_tokenizers_by_path(records, tmp_path):
    texts = [r['text'].replace('\n', ' ') for r in records[:200]]
    text = 'a naïve Hund 日本 and new ☃ things'
    for path in train_tokenizers(tmp_path, texts):
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids,
                                 tokenizer.eos_id]).decode().removeprefix(' ') == text and max(ids) < tokenizer.n_ids
        assert b''.join(tokenizer.decode([i]) for i in ids) == tokenizer.decode(ids)
    with open(tmp_path / 'a.jsonl', 'w') as file:
        file.writelines(json.dumps(r) + '\n' for r in records[:200])
    result = run('prepare_fineweb.py', tmp_path / 'a.jsonl', '--val_share=0.1', f'--tokenizer={tmp_path / "own.json"}',
                 f'--out_dir={tmp_path}/data')
    assert result.returncode == 0, result.stderr
    (tmp_path / 'own.json').unlink()  # the data folder keeps its own
    d = Data(tmp_path / 'data')
    tokenizer = load_tokenizer(d.tokenizer)
    ids = d.tokens('train', 0, 10_000).tolist()
    first = ids[:ids.index(d.eos_id)]
    assert tokenizer.decode(first).decode() == next(r['text'] for r in records
                                                             if split_of(r['id'], 0.1) == 'train')
    (tmp_path / 'bad.json').write_text('{}')
    with pytest.raises(UserError, match='is not a tokenizer.json'):
        load_tokenizer(tmp_path / 'bad.json')


@pytest.mark.skipif('GPT2_VOCABULARY' not in os.environ,
                    reason='needs GPT2_VOCABULARY, a folder with encoder.json and vocab.bpe')
def test_gpt2_from_files_equals_tiktokens(records, tmp_path, monkeypatch):
    import tiktoken
    folder = Path(os.environ['GPT2_VOCABULARY'])
    for name, file in (('6d1cbeee0f20b3d9449abfede4726ed8212e3aee', 'vocab.bpe'),
                       ('6c7ea1a7e38e3a7f062df639a5b80947f075ffe6', 'encoder.json')):
        (tmp_path / name).write_bytes((folder / file).read_bytes())  # as tiktoken keeps its downloads
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    want, got = tiktoken.get_encoding('gpt2'), load_tokenizer(folder)
    for text in [*(r['text'] for r in records[:300]), ' <|endoftext|> 12345 \r\n\t  don’t',
                 ''.join(map(chr, range(32, 0x3000)))]:
        assert got.encode(text) == want.encode_ordinary(text) == got.encode_array(text).tolist()
        assert got.decode(got.encode(text)).decode() == text
