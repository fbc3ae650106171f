"""What a .txt file means, to training and to prepare_fineweb.py; validation data from little; failed builds."""
import hashlib
import json
import shlex

import numpy as np
import pytest
from conftest import TINY, assert_sentence, run, train_tiny

import data
import prepare_fineweb
from common.files import UserError
from data import sources
from data.shards import Data, split_of

datasets = pytest.importorskip('datasets')
LINES = [f'Line {i} of a long text.' for i in range(400)]


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(data, 'BUILT', tmp_path / 'built')
    return tmp_path / 'built'


def texts_of(folder, split):
    """The documents of a split of byte tokens."""
    ids = np.concatenate([np.fromfile(path, '<u2') for path in sorted(folder.glob(f'{split}_*.bin'))])
    return [text.decode() for text in bytes(min(i, 255) for i in ids).split(b'\xff')[:-1]]


def prepare(source, out, *args):
    return run('prepare_fineweb.py', source, '--tokenizer=byte', '--workers=1', f'--out_dir={out}', *args)


def prepared(source, out, *args):
    result = prepare(source, out, *args)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize('text', ['\n'.join(LINES), ' '.join(LINES)])
def test_one_big_text_is_cut_the_same_way_by_training_and_by_preparation(text, tmp_path, capsys):
    """With line ends and without one; a file, or a folder with one."""
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts/all.txt').write_text(text)
    folders = [data.open_data(str(tmp_path / name)).folder for name in ('texts', 'texts/all.txt')]
    assert capsys.readouterr().out.count('one text: its last 10% are the validation data') == 2
    folders += [prepared(tmp_path / name, tmp_path / out) for name, out in (('texts', 'a'), ('texts/all.txt', 'b'))]
    for folder in folders:
        (train,), (val,) = texts_of(folder, 'train'), texts_of(folder, 'val')
        assert train + val == text and 0.09 < len(val) / len(text) < 0.19
        assert train.endswith('\n') == ('\n' in text)


def test_several_texts_are_a_document_each_for_training_and_for_preparation(tmp_path):
    (tmp_path / 'texts/more').mkdir(parents=True)
    for i, line in enumerate(LINES[:30]):
        (tmp_path / 'texts' / ('more' if i % 2 else '') / f'{i}.txt').write_text(f'{line}\n{i}')
    (tmp_path / 'texts/blank.txt').write_text('\n')
    folder = data.open_data(str(tmp_path / 'texts')).folder
    assert sorted(texts_of(folder, 'train') + texts_of(folder, 'val')) == sorted(
        f'{line}\n{i}' for i, line in enumerate(LINES[:30]))
    prepared(tmp_path / 'texts', tmp_path / 'out', '--val_share=0.05')
    for split in ('train', 'val'):
        assert texts_of(tmp_path / 'out', split) == texts_of(folder, split)


def test_split_lines_makes_each_line_a_document_wherever_reading_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'BATCH', 7)
    (tmp_path / 'all.txt').write_text('\n\n'.join(LINES))
    s = prepare_fineweb.Settings(split_lines=True)
    read, *_ = sources.open_source(str(tmp_path / 'all.txt'), s)
    whole = list(sources.batches(read, s, sources.START))
    assert [text for _, batch in whole for _, text in batch] == LINES
    assert list(sources.batches(read, s, whole[20][0])) == whole[20:]
    prepared(tmp_path / 'all.txt', tmp_path / 'out', '--split_lines')
    assert len(texts_of(tmp_path / 'out', 'val')) == 10


@pytest.mark.parametrize('n', [2, 40, 1000])
def test_the_command_that_preparation_prints_can_run(n, tmp_path):
    """However few documents there are; val_share grows where it must, and no more."""
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'id': i, 'text': LINES[i % 400]}) + '\n' for i in range(n)))
    result = prepare(tmp_path / 'a.jsonl', tmp_path / 'out')
    n_val = {2: 1, 40: 2, 1000: 10}[n]
    assert result.returncode == 0 and f'which leaves {n_val}' in result.stdout, result.stderr
    assert Data(tmp_path / 'out').splits['val']['documents'] == n_val
    command = shlex.split(result.stdout.splitlines()[-1].partition(' is ready: ')[2])
    assert command[:2] == ['python', 'train.py']
    small = [arg for arg in TINY if not arg.startswith('--block_size')]
    result = run(*command[1:], *small, f'--out_dir={tmp_path}/run', '--max_tokens=100')
    assert result.returncode == 0, result.stderr


def test_val_share_looks_no_further_than_max_tokens_reaches(tmp_path):
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'id': i, 'text': text}) + '\n'
                                              for i, text in enumerate(LINES)))
    prepared(tmp_path / 'a.jsonl', tmp_path / 'out', '--max_tokens=1000', '--val_share=0.03')
    splits = Data(tmp_path / 'out').splits
    assert splits['val']['documents'] >= 1 and sum(split['tokens'] for split in splits.values()) < 1100
    assert not any(split_of(str(i), 0.03) == 'val' for i in range(40))  # which is what it had to mend


@pytest.mark.parametrize('is_old', [False, True])
def test_an_interrupted_preparation_goes_on_with_the_share_that_it_began_with(is_old, tmp_path, monkeypatch):
    """Older code did not look for one that fits, and knew no split_lines."""
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'id': i, 'text': text}) + '\n'
                                              for i, text in enumerate(LINES)))
    args = [tmp_path / 'a.jsonl', tmp_path / 'out', '--shard_tokens=4000', f'--val_share={0.02 if is_old else 0.001}']

    def interrupt(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(prepare_fineweb.ShardWriter, 'finish', interrupt)
        if is_old:
            patch.setattr(prepare_fineweb, 'fitting_share', lambda *_: 0.02)
        assert prepare(*args).returncode == 130
    progress = json.loads((tmp_path / 'out/progress.json').read_text())
    assert progress['position']['documents'] > 100
    if is_old:
        progress.pop('crc32', None)
        for later in ('fitting_share', 'split_lines', 'val_hash', 'shuffle'):
            del progress['arguments'][later]
        (tmp_path / 'out/progress.json').write_text(json.dumps(progress))
    prepared(*args)
    share = 0.02 if is_old else progress['arguments']['fitting_share']
    for split in ('train', 'val'):
        assert texts_of(tmp_path / 'out', split) == [
            text for i, text in enumerate(LINES) if split_of(str(i), share) == split]


@pytest.mark.parametrize('as_dict', [True, False])
def test_a_dataset_that_was_saved_to_disk_is_a_source(as_dict, tmp_path):
    saved = datasets.Dataset.from_list([{'id': str(i), 'text': text} for i, text in enumerate(LINES)])
    (datasets.DatasetDict(train=saved) if as_dict else saved).save_to_disk(tmp_path / 'saved')
    prepared(tmp_path / 'saved', tmp_path / 'out', '--val_share=0.1', '--shard_tokens=3000')
    for split in ('train', 'val'):
        want = [text for i, text in enumerate(LINES) if split_of(str(i), 0.1) == split]
        assert texts_of(tmp_path / 'out', split) == want
    if as_dict:
        assert_sentence(prepare(tmp_path / 'saved', tmp_path / 'no', '--split=test'), "no split 'test'", 'train')


def test_a_build_that_fails_leaves_nothing(tmp_path, built):
    (tmp_path / 'a.jsonl').write_text('{"id": 1, "text": "a"}\n{"id": 2}\n')
    (tmp_path / 'same.jsonl').write_text('{"id": 1, "text": "a"}\n' * 5)
    (tmp_path / 'latin.txt').write_bytes('naïve'.encode('latin1'))
    (tmp_path / 'blank.txt').write_text(' \n')
    before = sorted(tmp_path.iterdir())
    for name, part in (('a.jsonl', "no field 'text'"), ('same.jsonl', 'bytes of text in its split'),
                       ('latin.txt', 'expected text in UTF-8'), ('blank.txt', 'has no records'), ('none', 'none')):
        assert_sentence(prepare(tmp_path / name, tmp_path / 'out'), part)
        assert sorted(tmp_path.iterdir()) == before, name
    (tmp_path / 'out').mkdir()
    assert_sentence(prepare(tmp_path / 'same.jsonl', tmp_path / 'out'), 'bytes of text in its split')
    assert list((tmp_path / 'out').iterdir()) == []
    for name in ('latin.txt', 'blank.txt'):
        assert_sentence(train_tiny(tmp_path / name, tmp_path / 'run'), name.partition('.')[0])
        assert [*built.glob('*')] == [] and not (tmp_path / 'run').exists()


def test_a_source_that_is_not_there_is_told_before_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, 'load_tokenizer', lambda *_: pytest.fail('the tokenizer came first'))
    nowhere = tmp_path / 'nowhere.jsonl'
    assert_sentence(run('prepare_fineweb.py', nowhere, f'--out_dir={tmp_path}/out'), f'no file matches {nowhere}')


def test_a_folder_with_nothing_to_read_names_what_could_be(tmp_path):
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'docs/page.md').write_text('# A page')
    result = prepare(tmp_path / 'docs', tmp_path / 'out')
    assert_sentence(result, 'docs has no files that can be read: expected some of .parquet', 'the name .txt')
    assert 'DataFilesNotFoundError' not in result.stderr and not (tmp_path / 'out').exists()


def test_a_folder_of_texts_and_records_is_not_read_as_texts(tmp_path):
    (tmp_path / 'LICENSE.txt').write_text('do as you like')
    (tmp_path / 'a.jsonl').write_text('{"id": 1, "text": "a"}\n')
    assert sources.local_files(str(tmp_path)) == []
    with pytest.raises(UserError, match='has records beside 1 .txt: make a data folder'):
        data.open_data(str(tmp_path))
    with pytest.raises(UserError, match='expected files of one kind'):
        sources.local_files(f'{tmp_path}/*')


# ---- shuffling, and the recipe of FineWeb-Edu ----

@pytest.fixture(params=['jsonl', 'parquet'])
def many_files(request, tmp_path):
    """A pattern of 5 files with 80 records each."""
    (tmp_path / 'files').mkdir()
    for i in range(5):
        records = [{'id': str(n), 'text': text} for n, text in enumerate(LINES) if n // 80 == i]
        path = tmp_path / f'files/{i}.{request.param}'
        if request.param == 'jsonl':
            path.write_text(''.join(json.dumps(record) + '\n' for record in records))
        else:
            datasets.Dataset.from_list(records).to_parquet(path)
    return tmp_path / f'files/*.{request.param}'


def test_shuffling_reorders_files_and_documents_and_loses_none(many_files):
    s = prepare_fineweb.Settings(shuffle=100)
    read, *_ = sources.open_source(str(many_files), s)
    order = [LINES.index(text) for _, batch in sources.batches(read, s, sources.START) for _, text in batch]
    assert sorted(order) == [*range(400)]
    assert [i // 80 for i in order[:60]] != sorted(i // 80 for i in order[:60])  # a block spans two files, mixed
    assert min(order[:100]) >= 80  # the first file is not the first any more
    assert sum(b == a + 1 for a, b in zip(order, order[1:])) < 20


def test_shuffled_reading_goes_on_from_every_batch_with_the_same_documents(many_files, monkeypatch):
    monkeypatch.setattr(sources, 'BATCH', 30)
    s = prepare_fineweb.Settings(shuffle=100)
    read, checksum, _ = sources.open_source(str(many_files), s)
    assert checksum == sources.open_source(str(many_files), prepare_fineweb.Settings())[1]  # of the source alone
    whole = list(sources.batches(read, s, sources.START))
    for i, (position, batch) in enumerate(whole):
        position = json.loads(json.dumps({**position, 'skip': 7, 'documents': position['documents'] + 7}))
        rest = list(sources.batches(sources.open_source(str(many_files), s)[0], s, position))
        assert [batch[7:], *(batch for _, batch in whole[i + 1:])] == [batch for _, batch in rest]


def test_an_interrupted_shuffled_preparation_ends_with_the_same_bytes(many_files, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'BATCH', 30)
    options = ['--shuffle=100', '--shard_tokens=1500', '--val_share=0.1', '--val_hash=md5']
    whole = prepared(many_files, tmp_path / 'whole', *options)
    saves = iter(range(100))

    def save_and_die(*args, save=prepare_fineweb.save_progress):
        save(*args)
        if next(saves) == 2:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(prepare_fineweb, 'save_progress', save_and_die)
        assert prepare(many_files, tmp_path / 'out', *options).returncode == 130
    assert 0 < json.loads((tmp_path / 'out/progress.json').read_text())['position']['state']['yielded']
    prepared(many_files, tmp_path / 'out', *options)
    for path in whole.glob('[a-z]*'):
        assert (tmp_path / 'out' / path.name).read_bytes() == path.read_bytes(), path.name
    is_val = [int.from_bytes(hashlib.md5(f'42:{i}'.encode()).digest()[:8], 'little') < 0.1 * 2 ** 64
              for i in range(400)]
    assert sorted(texts_of(whole, 'val')) == sorted(text for i, text in enumerate(LINES) if is_val[i])


def test_fineweb_edu_has_the_recipe_of_the_sps_paper_by_default_and_other_sources_have_not(monkeypatch):
    chosen = []
    monkeypatch.setattr(prepare_fineweb, 'prepare', lambda name, s: chosen.append((
        name, s.config, s.val_share, s.val_hash, s.shuffle)))
    for args in ([], ['--config=sample-10BT', '--shuffle=0'], ['allenai/c4']):
        prepare_fineweb.main(args)
    assert chosen == [('HuggingFaceFW/fineweb-edu', 'sample-350BT', 0.0005, 'md5', 200_000),
                      ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 0.0005, 'md5', 0),
                      ('allenai/c4', None, 0.001, 'sha256', 0)]
    assert_sentence(run('prepare_fineweb.py', '--val_hash=crc'), "val_hash is 'crc': expected md5 or sha256")
