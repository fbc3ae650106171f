"""prepare_fineweb.py on small files: interruptions, several workers, and bad input."""
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time

import conftest
import pytest
from conftest import ROOT, TINY, assert_sentence, byte_documents, contents, run, succeeded

import prepare_fineweb
from lm_architectures.data.text.shards import Data
from lm_architectures.data.text.writing import split_of

datasets = pytest.importorskip('datasets')
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def records():
    rng = random.Random(0)
    return [{'text': ' '.join(rng.choices(['naïve', 'a', 'Hund', '日本', '\n'], k=rng.randint(1, 300))),
             'id': f'<urn:{i}>', 'score': i / 7}
            for i in range(3000)]


@pytest.fixture(scope='module')
def fineweb(records, tmp_path_factory):
    """Write a dataset like FineWeb-Edu: configurations in README.md, parquet files for each."""
    folder = tmp_path_factory.mktemp('hub') / 'fineweb-edu'
    (folder / 'sample/100BT').mkdir(parents=True)
    (folder / 'README.md').write_text('---\nconfigs:\n- config_name: sample-100BT\n  data_files:\n  - split: train\n'
                                      '    path: sample/100BT/*\n---\n')
    for i in range(3):
        part = datasets.Dataset.from_list(records[i * 1000:(i + 1) * 1000])
        part.to_parquet(folder / f'sample/100BT/{i:03d}_00000.parquet', batch_size=300)
    return folder


@pytest.fixture(scope='module')
def source(records, tmp_path_factory):
    path = tmp_path_factory.mktemp('source') / 'a.jsonl'
    path.write_text(''.join(json.dumps(record) + '\n' for record in records[:600]))
    return path


def prepare(source, out, *args, function=conftest.prepare):
    return function(source, out, '--val_fraction=0.1', '--shard_tokens=100_000', *args)


def prepared(source, out, *args):
    return prepare(source, out, *args, function=conftest.prepared)


@pytest.fixture(scope='module')
def streamed(fineweb, tmp_path_factory):
    """Prepare data without interruption, with one worker, streaming as from the Hub."""
    return prepared(fineweb, tmp_path_factory.mktemp('prepared') / 'data', '--config=sample-100BT')


@pytest.fixture(scope='module')
def whole(source, tmp_path_factory):
    return prepared(source, tmp_path_factory.mktemp('local') / 'data')


def interrupt(*_):
    raise KeyboardInterrupt


def test_streamed_and_local_data_give_the_same_shards(streamed, fineweb, records, tmp_path):
    for split in ('train', 'val'):
        assert byte_documents(streamed, split) == [r['text'] for r in records if split_of(r['id'], 0.1) == split]
    d = Data(streamed)
    d.verify()
    shards = {shard['file'] for info in d.splits.values() for shard in info['shards']}
    assert len(shards) > 5 and contents(streamed).keys() == {'meta.json', *shards}
    assert contents(prepared(fineweb, tmp_path / 'local', '--workers=2')) == contents(streamed)


def test_the_printed_training_command_runs(tmp_path):
    """Even if the data are two documents."""
    (tmp_path / 'a.jsonl').write_text('{"id": 1, "text": "Line 1 of a text."}\n{"id": 2, "text": "Another line."}\n')
    result = succeeded(prepare(tmp_path / 'a.jsonl', tmp_path / 'out', '--val_fraction=0.001'))
    assert Data(tmp_path / 'out').splits['val']['documents'] == 1
    command = shlex.split(result.stdout.splitlines()[-1].partition(' is ready: ')[2])
    assert command[:2] == ['python', 'train.py']
    small = [arg for arg in TINY if not arg.startswith('--block_size')]
    succeeded(run(*command[1:], *small, f'--out_dir={tmp_path}/run', '--max_tokens=100'))


# ---- interruptions ----

@pytest.mark.parametrize('options', [[], ['--shuffle=100', '--val_hash=md5', '--val_fraction=0.001']])
def test_preparation_interrupted_after_each_shard_gives_the_same_bytes(source, records, tmp_path, monkeypatch, options):
    monkeypatch.setattr(prepare_fineweb, 'BATCH', 30)
    monkeypatch.setattr(prepare_fineweb, 'BATCHES_PER_WORKER', 2)
    whole, out, n_starts = prepared(source, tmp_path / 'whole', *options), tmp_path / 'out', 0

    def save_and_die(progress, writer, save=prepare_fineweb.save_progress):
        before = prepare_fineweb.read_progress(out)
        save(progress, writer)
        if before and progress['splits'] != before['splits']:  # not at a start
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(prepare_fineweb, 'save_progress', save_and_die)
        while (result := prepare(source, out, *options)).returncode:
            assert result.returncode == 130, result.stderr
            n_starts += 1
            assert n_starts < 20
            with open(next(out.glob('val_*')), 'ab') as file:  # as if written after the last save of progress.json
                file.write(b'more')
    assert n_starts >= 2 and contents(out) == contents(whole)
    if options:  # val_fraction was raised to ten documents
        by_md5 = sorted(records[:600], key=lambda record: int.from_bytes(
            hashlib.md5(f'42:{record["id"]}'.encode()).digest()[:8], 'little'))
        assert sorted(byte_documents(whole, 'val')) == sorted(record['text'] for record in by_md5[:10])


@pytest.fixture(scope='module')
def half(source, tmp_path_factory):
    """Interrupt a preparation with a custom tokenizer after its last full shard."""
    folder = tmp_path_factory.mktemp('half')
    succeeded(run('-m', 'lm_architectures.data.text.train_tokenizer', source, '--vocab_size=300',
                  f'--out={folder}/own.json'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.ShardWriter, 'finish', interrupt)
        result = prepare(source, folder / 'data', f'--tokenizer={folder}/own.json', '--shard_tokens=30_000')
    assert result.returncode == 130, result.stderr
    return folder / 'data'


@pytest.mark.parametrize('name, damage', [
    ('train_00000.bin', lambda path: path.write_bytes(b'\1' + path.read_bytes()[1:])),
    ('train_00001.bin', lambda path: os.truncate(path, 1000)), ('val_00000.bin', os.remove)])
def test_existing_shards_are_checked_before_preparation_continues(half, source, tmp_path, name, damage):
    out = shutil.copytree(half, tmp_path / 'data')
    damage(out / name)
    assert_sentence(prepare(source, out, f'--tokenizer={half.parent}/own.json', '--shard_tokens=30_000'),
                    f'{out / name} is missing or does not match its checksum', f'remove {out} and start again')


@pytest.mark.parametrize('what', ['source', 'tokenizer', 'val_hash'])
def test_preparation_continues_only_with_the_same_source_tokenizer_and_settings(half, source, what):
    own = half.parent / 'own.json'
    changed = {'source': source, 'tokenizer': own, 'val_hash': half / '.lock'}[what]
    before, stat = changed.read_bytes(), changed.stat()
    changed.write_bytes(before + b'\n')
    options = ['--val_hash=md5'] if what == 'val_hash' else []
    assert_sentence(prepare(source, half, f'--tokenizer={own}', '--shard_tokens=30_000', *options),
                    f'{half} was started with {what}', '(now ')
    changed.write_bytes(before)
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_killed_preparation_continues_to_the_same_bytes(streamed, fineweb, tmp_path):
    out = tmp_path / 'out'
    process = subprocess.Popen([sys.executable, 'prepare_fineweb.py', str(fineweb), '--config=sample-100BT',
                                f'--out_dir={out}', '--tokenizer=byte', '--val_fraction=0.1', '--shard_tokens=100_000',
                                '--workers=2'], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (out / 'train_00004.bin').exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    assert_sentence(prepare(fineweb, out), 'is being written by process')
    process.kill()
    process.wait()
    result = succeeded(prepare(fineweb, out, '--config=sample-100BT'))
    assert 'continuing after document' in result.stdout and contents(out) == contents(streamed)


# ---- bad input ----

@pytest.mark.parametrize('name, content, options, sentence', [
    ('late.jsonl', '{"url": 1, "text": "a"}\n{"text": "b"}\n', ['--id_field=url'], "no field 'url'"),
    ('same.jsonl', '{"id": 1, "text": "a"}\n' * 5, [], 'bytes of text, val'),
    ('blank.txt', ' \n', [], 'blank.txt has no text\n'),
    ('a.jsonl', '{"id": 1, "text": "a"}\n', ['--text_field=body'], 'fields: id, text'),
    ('docs', None, [], 'docs could not be opened'), ('none.jsonl', None, [], 'no file matches'),
    *(('a.jsonl', '', [f'--{setting}'], setting.split('=')[0]) for setting in (
        'max_tokens=0', 'max_tokens=1e40', 'shard_tokens=0', 'workers=-1', 'val_fraction=1', 'val_hash=crc'))])
def test_bad_input_gives_a_clear_error_and_leaves_a_usable_folder(source, whole, tmp_path, name, content, options,
                                                                  sentence):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert_sentence(conftest.prepare(tmp_path / name, tmp_path / 'out', *options), sentence)
    assert contents(prepared(source, tmp_path / 'out')) == contents(whole)


@pytest.mark.parametrize('name, content, sentence', [
    ('thesis.tex', 'x', 'contains other files (thesis.tex)'), ('meta.json', '{}', 'is already complete'),
    ('progress.json', '{"mine": 1}', 'contains other files'), ('progress.json', '[', 'progress.json is damaged'),
    (None, 'a file', 'Not a directory')])
def test_a_foreign_folder_is_refused_and_unchanged(tmp_path, source, name, content, sentence):
    path = tmp_path / 'out' / (name or '')
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    before = sorted(tmp_path.rglob('*'))
    assert_sentence(prepare(source, tmp_path / 'out'), sentence)
    assert sorted(tmp_path.rglob('*')) == before and path.read_text() == content


def test_the_sps_papers_recipe_is_the_default_for_fineweb_edu_only(monkeypatch):
    chosen = []
    monkeypatch.setattr(prepare_fineweb, 'prepare', lambda name, s: chosen.append((
        name, s.config, s.val_fraction, s.val_hash, s.shuffle)))
    for args in ([], ['--config=sample-10BT', '--shuffle=0'], ['allenai/c4']):
        prepare_fineweb.main(args)
    assert chosen == [('HuggingFaceFW/fineweb-edu', 'sample-350BT', 0.0005, 'md5', 200_000),
                      ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 0.0005, 'md5', 0),
                      ('allenai/c4', None, 0.001, 'sha256', 0)]
