"""prepare_fineweb.py on small files that the tests write: every kind of source, killed and resumed, any number of
workers."""
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_sentence, run

import prepare_fineweb
from common.files import UserError, locked
from data.shards import Data, document_ids, split_of, write_data
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


def saved_documents(out):
    path = out / 'progress.json'
    return json.loads(path.read_text())['position']['documents'] if path.exists() else 0


@pytest.mark.parametrize('n_kills', [2, pytest.param(6, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(prepared, fineweb, tmp_path, n_kills):
    rng, out, kills = random.Random(1), tmp_path / 'data', 0
    args = ['prepare_fineweb.py', str(fineweb), *FAST, '--config=sample-100BT', f'--out_dir={out}',
            '--shard_tokens=100_000']
    while kills < n_kills or not saved_documents(out):  # on a slow disk both may be before a first shard counts
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
    assert_sentence(prepare(fineweb, '--text_field=body'), "record 1 has no field 'body'",
                    'the fields are text, id, score')
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
                    '--tokenizer=FOLDER')
    assert_sentence(run('prepare_fineweb.py', fineweb, f'--out_dir={tmp_path}/gpt2', f'--tokenizer={tmp_path}'),
                    'encoder.json is missing', 'sha256')


# ---- sources that cannot be read ----

def read_all(source, **settings):
    """All (split, text) of a source, without workers and without a data folder."""
    s = prepare_fineweb.Settings(tokenizer='byte', **settings)
    read, *_ = prepare_fineweb.open_source(str(source), s)
    start = {'state': None, 'skip': 0, 'documents': 0}
    return [document for _, batch in prepare_fineweb.batches(read, s, start) for document in batch]


RECORD = b'{"text": "a", "id": 1}\n'
MANY = gzip.compress(b''.join(b'{"text": "%d", "id": 1}\n' % (i * i) for i in range(5000)))


@pytest.mark.parametrize('name, content, sentence', [
    ('a.jsonl', b'', 'a.jsonl is empty: remove it, or fetch it again'),
    ('a.jsonl.gz', b'', 'a.jsonl.gz is empty'),
    ('a.parquet', b'', 'a.parquet is empty'),
    ('a.parquet', b'PAR1 and nothing else', 'a.parquet could not be opened (ArrowInvalid)'),
    ('a.jsonl', RECORD * 400 + b'{"text": "a", ', 'a.jsonl cannot be read after line 400 (JSONDecodeError)'),
    ('a.jsonl', RECORD + b'{"text": "\xff"}', 'a.jsonl cannot be read after line 1 (UnicodeDecodeError)'),
    ('a.jsonl', RECORD + b'[' * 100_000, 'a.jsonl cannot be read after line 1 (RecursionError)'),
    ('a.jsonl', RECORD + b'[1, 2]\n', 'a.jsonl, line 2) is [1, 2]: expected an object with fields, {"text": ...}'),
    ('a.jsonl', RECORD + b'{"text": 5, "id": 1}\n', "a.jsonl, line 2) has 5 in field 'text', expected text"),
    ('a.jsonl', RECORD + b'{"text": "a", "id": 1.5}\n', "a.jsonl, line 2) has 1.5 in field 'id', expected an id"),
    ('a.jsonl', RECORD + b'{"text": "a"}\n', "a.jsonl, line 2) has no field 'id', expected an id"),
    ('a.jsonl.gz', MANY[:len(MANY) // 2], 'a.jsonl.gz cannot be read after line'),
    ('a.jsonl.gz', MANY[:5000] + b'flip' + MANY[5004:], 'a.jsonl.gz cannot be read after line'),
    ('a.jsonl.gz', RECORD, 'a.jsonl.gz cannot be read after line 0 (BadGzipFile)'),
    ('a.txt', b'ab\xff', 'a.txt cannot be read after line 0 (UnicodeDecodeError)'),
    ('a.csv', b'1,2', 'a.csv matches'),
])
def test_a_source_that_cannot_be_read_is_a_sentence_that_names_file_and_line(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_all(tmp_path / name)
    assert sentence in str(error.value)


def test_a_source_without_records_or_without_a_name_is_a_sentence(tmp_path):
    (tmp_path / 'blank.jsonl').write_text('\n \n')
    (tmp_path / 'folder.jsonl').mkdir()
    for source, sentence in (('blank.jsonl', 'blank.jsonl has no records'), ('*.jsonl', 'folder.jsonl'),
                             ('none[0].jsonl', 'no file matches')):
        assert_sentence(run('prepare_fineweb.py', tmp_path / source, *FAST, f'--out_dir={tmp_path}/out'), sentence)
    assert_sentence(run('prepare_fineweb.py', ''), 'the source is empty: expected a file')


def test_a_name_with_brackets_is_a_file_and_a_pattern_where_there_is_none(tmp_path):
    for name in ('a[1].jsonl', 'a1.jsonl'):
        (tmp_path / name).write_text(json.dumps({'text': name, 'id': 1}) + '\n')
    (tmp_path / 'list[0].json').write_text(json.dumps([{'text': 'one', 'id': 1}, {'text': 'two', 'id': 2}]))
    assert [text for _, text in read_all(tmp_path / 'a[1].jsonl')] == ['a[1].jsonl']
    assert [text for _, text in read_all(tmp_path / 'list[0].json')] == ['one', 'two']
    (tmp_path / 'a[1].jsonl').unlink()
    assert [text for _, text in read_all(tmp_path / 'a[1].jsonl')] == ['a1.jsonl']


def test_reading_goes_on_from_every_batch_with_the_same_documents(records, tmp_path):
    for i in range(3):
        with open(tmp_path / f'{i}.jsonl', 'w') as file:
            file.writelines(json.dumps(record) + '\n\n' for record in records[i * 700:(i + 1) * 700])
    s = prepare_fineweb.Settings(tokenizer='byte')
    read, *_ = prepare_fineweb.open_source(f'{tmp_path}/*.jsonl', s)
    whole = list(prepare_fineweb.batches(read, s, {'state': None, 'skip': 0, 'documents': 0}))
    assert [text for _, batch in whole for _, text in batch] == [record['text'] for record in records[:2100]]
    for i, (position, batch) in enumerate(whole):
        inside = {**position, 'skip': 5, 'documents': position['documents'] + 5}
        rest = list(prepare_fineweb.batches(read, s, inside))
        assert [batch[5:], *(batch for _, batch in whole[i + 1:])] == [batch for _, batch in rest]


@pytest.mark.parametrize('state', [{'file': 1, 'line': 0}, {'file': 0, 'line': '5'}, {'line': 0}])
def test_a_place_that_the_source_does_not_have_is_a_sentence(source, state):
    read, *_ = prepare_fineweb.open_source(str(source), prepare_fineweb.Settings())
    with pytest.raises(UserError, match='progress.json is damaged.* is no place in the source'):
        list(read({'state': state}))


@pytest.mark.parametrize('setting', [
    'max_tokens=0', 'max_tokens=1e40', 'shard_tokens=0', 'shard_tokens=1e30', 'workers=-1', 'workers=1e9',
    'val_share=0', 'val_share=1', 'val_share=-1', 'val_share=1e400'])
def test_a_setting_out_of_its_range_is_a_sentence(tmp_path, setting):
    name, value = setting.split('=')
    assert_sentence(run('prepare_fineweb.py', 'x.jsonl', f'--out_dir={tmp_path}/out', f'--{setting}'), name,
                    ': expected ')
    assert list(tmp_path.iterdir()) == []


# ---- what lies in the folder ----

def test_a_folder_of_something_else_is_refused_and_left_as_it_was(tmp_path, records):
    source, out = tmp_path / 'a.jsonl', tmp_path / 'out'
    source.write_text(json.dumps(records[0]) + '\n')
    for name, content, sentence in (('thesis.tex', 'x', 'has files that are not of a preparation (thesis.tex)'),
                                    ('progress.json', '{"mine": 1}', 'progress.json is damaged'),
                                    ('progress.json', '[', 'progress.json is damaged'),
                                    ('meta.json', '{}', 'is complete (it has a meta.json)')):
        out.mkdir()
        (out / name).write_text(content)
        assert_sentence(run('prepare_fineweb.py', source, *FAST, f'--out_dir={out}'), sentence)
        assert {path.name: path.read_text() for path in out.iterdir()} == {name: content}
        shutil.rmtree(out)
    out.write_text('a file')
    assert_sentence(run('prepare_fineweb.py', source, *FAST, f'--out_dir={out}'), 'out is a file')


@pytest.fixture(scope='module')
def source(records, tmp_path_factory):
    path = tmp_path_factory.mktemp('source') / 'a.jsonl'
    path.write_text(''.join(json.dumps(record) + '\n' for record in records[:600]))
    return path


@pytest.fixture(scope='module')
def half(source, tmp_path_factory):
    """A folder whose preparation was stopped after its third shard."""
    folder = tmp_path_factory.mktemp('half') / 'data'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.ShardWriter, 'finish', interrupt)
        result = prepare_source(source, folder)
    assert result.returncode == 130 and len([*folder.glob('.pending_*')]) == 1, result.stderr
    return folder


def interrupt(*_):
    raise KeyboardInterrupt


def prepare_source(source, out, *args):
    return run('prepare_fineweb.py', source, *FAST, '--shard_tokens=100_000', '--workers=1', f'--out_dir={out}', *args)


def test_what_a_stopped_preparation_left_is_checked_before_it_goes_on(half, source, tmp_path):
    def damaged(name, damage, sentence):
        out = shutil.copytree(half, tmp_path / 'data')
        path, = out.glob(name)
        damage(path)
        before = contents(out)
        assert_sentence(prepare_source(source, out), f'{path} {sentence}', f'remove {out} and start again')
        assert contents(out) == before
        shutil.rmtree(out)

    def flip(path):
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
    damaged('train_00001.bin', lambda path: os.truncate(path, 1000), 'has 1000 bytes and had')
    damaged('train_00001.bin', flip, 'does not match its checksum')
    damaged('train_00000.bin', Path.unlink, 'is missing')
    damaged('.pending_*', flip, 'does not match its checksum')
    damaged('.pending_*', Path.unlink, 'is missing')

    out = shutil.copytree(half, tmp_path / 'data')
    (out / 'train_00001.crc32').unlink()  # it follows from the shard
    result = prepare_source(source, out)
    assert result.returncode == 0 and 'going on after document' in result.stdout, result.stderr
    assert prepare_source(source, tmp_path / 'whole').returncode == 0
    assert contents(out) == contents(tmp_path / 'whole')


def test_a_source_or_tokenizer_that_changed_meanwhile_is_a_sentence(half, source, records, tmp_path):
    before, stat = source.read_bytes(), source.stat()
    changed = [lambda: source.write_bytes(before + RECORD), lambda: source.write_bytes(before),  # later, the same
               lambda: source.write_bytes(before[:-1])]
    for change in changed:
        change()
        assert_sentence(prepare_source(source, half), f'the source has changed since {half} was begun')
    source.write_bytes(before)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    paths = train_tokenizers(tmp_path, [record['text'].replace('\n', ' ') for record in records[:200]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.ShardWriter, 'finish', interrupt)
        prepare_source(source, tmp_path / 'out', f'--tokenizer={paths[0]}', '--shard_tokens=10_000')
    paths[0].write_text(paths[0].read_text().replace('  "', ' "', 1))
    assert_sentence(prepare_source(source, tmp_path / 'out', f'--tokenizer={paths[0]}', '--shard_tokens=10_000'),
                    f'the tokenizer has changed since {tmp_path}/out was begun')


def test_a_dataset_folder_and_parquet_files_have_an_identity_of_their_own(fineweb, tmp_path):
    parquet = shutil.copytree(fineweb / 'sample/100BT', tmp_path / 'texts') / '000_00000.parquet'
    s = prepare_fineweb.Settings(tokenizer='byte')
    for source in (tmp_path / 'texts', f'{tmp_path}/texts/*.parquet'):
        checksum = prepare_fineweb.open_source(str(source), s)[1]
        assert checksum == prepare_fineweb.open_source(str(source), s)[1]
        os.utime(parquet)
        assert checksum != prepare_fineweb.open_source(str(source), s)[1]


def test_without_a_whole_shard_other_arguments_are_as_good(source, tmp_path):
    assert_sentence(prepare_source(source, tmp_path / 'out', '--text_field=body'), "has no field 'body'")
    assert prepare_source(source, tmp_path / 'out', '--max_tokens=50_000').returncode == 0


@pytest.mark.parametrize('path, value', [
    *(((name,), value) for name in ('arguments', 'splits', 'position', 'pending') for value in (None, 5, [])),
    (('splits', 'train'), None), (('splits', 'train', 'tokens'), '5'), (('splits', 'train', 'shards'), [{}]),
    (('splits', 'train', 'shards', 0, 'file'), '../x'), (('pending', 'train'), '.pending_train_5.bin'),
    (('position', 'skip'), -1), (('position', 'documents'), None), (('position', 'state'), 7)])
def test_wrong_types_in_progress_json_are_sentences(half, tmp_path, path, value):
    saved = json.loads((half / 'progress.json').read_text())
    inner = saved
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / 'progress.json').write_text(json.dumps(saved))
    with pytest.raises(UserError, match='progress.json is damaged .* cannot be '):
        prepare_fineweb.read_progress(tmp_path)


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_the_workers_of_a_killed_preparation_end_and_the_folder_is_free(source, tmp_path):
    out = tmp_path / 'out'
    process = subprocess.Popen([sys.executable, 'prepare_fineweb.py', str(source), *FAST, f'--out_dir={out}',
                                '--shard_tokens=1', '--workers=2'], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (out / 'train_00001.bin').exists():
        assert process.poll() is None
        time.sleep(0.01)
    workers = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
    assert len(workers) == 2
    assert_sentence(prepare_source(source, out), 'is being written by process')
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(Path(f'/proc/{pid}').exists() for pid in workers) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(Path(f'/proc/{pid}').exists() for pid in workers)
    with locked(out):
        pass


# ---- tokenizers ----

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


def test_a_special_token_spelled_in_a_document_is_text(tmp_path):
    tokenizer = load_tokenizer(train_tokenizers(tmp_path, ['some text'] * 9)[0])
    text = 'before <|endoftext|> after'
    assert tokenizer.encode(text).count(tokenizer.eos_id) == 1  # a prompt may give it
    ids = document_ids(tokenizer, text).tolist()
    assert ids.index(tokenizer.eos_id) == len(ids) - 1 and tokenizer.decode(ids).decode() == text


def test_an_added_token_decodes_to_itself_and_words_in_pieces_are_a_sentence(tmp_path):
    from tokenizers import Tokenizer, decoders
    path = train_tokenizers(tmp_path, ['some text'] * 9)[0]
    fast = Tokenizer.from_file(str(path))
    fast.add_tokens(['caf\u00e9'])
    fast.save(str(path))
    tokenizer = load_tokenizer(path)
    assert len(ids := tokenizer.encode('caf\u00e9 \u00e9')) < 5 and tokenizer.decode(ids).decode() == 'caf\u00e9 \u00e9'
    for fast.decoder in (decoders.WordPiece(), decoders.BPEDecoder()):
        fast.save(str(path))
        with pytest.raises(UserError, match='expected one by bytes'):
            load_tokenizer(path)


def test_padding_and_truncation_stored_in_a_tokenizer_are_not_obeyed(tmp_path):
    from tokenizers import Tokenizer
    path = train_tokenizers(tmp_path, ['some text'] * 9)[0]
    plain, stored = load_tokenizer(path).encode('some more text'), Tokenizer.from_file(str(path))
    stored.enable_padding(length=16, pad_id=0, pad_token='<|endoftext|>')
    stored.enable_truncation(2)
    stored.save(str(path))
    assert load_tokenizer(path).encode('some more text') == plain and 2 < len(plain) < 16


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
    write_data(tmp_path / 'written', load_tokenizer(tmp_path / 'own.json'), [('train', 'a'), ('val', 'b')])
    (tmp_path / 'own.json').unlink()  # a data folder keeps its own
    assert load_tokenizer(Data(tmp_path / 'written').tokenizer).encode('b')
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
        assert got.encode(text) == want.encode_ordinary(text) == got.encode_document(text).tolist()
        assert got.decode(got.encode(text)).decode() == text


def test_ctrl_c_when_all_is_written_takes_nothing_away(source, tmp_path, monkeypatch):
    class Interrupted(prepare_fineweb.ProcessPoolExecutor):
        def shutdown(self, *args, **options):
            super().shutdown(*args, **options)
            raise KeyboardInterrupt
    monkeypatch.setattr(prepare_fineweb, 'ProcessPoolExecutor', Interrupted)
    assert prepare_source(source, tmp_path / 'out').returncode == 130
    Data(tmp_path / 'out').verify()


def test_text_in_parquet_that_is_not_utf8_is_a_sentence(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet
    text = pa.StringArray.from_buffers(2, pa.py_buffer(b'\0\0\0\0\1\0\0\0\3\0\0\0'), pa.py_buffer(b'a\xffb'))
    pa.parquet.write_table(pa.table({'text': text, 'id': ['1', '2']}), tmp_path / 'bad.parquet')
    assert_sentence(prepare_source(tmp_path / 'bad.parquet', tmp_path / 'out'),
                    'bad.parquet cannot be read after record 0 (UnicodeDecodeError)')
