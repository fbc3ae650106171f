"""Parts of a source, prepared apart, and the data folder that --merge makes of them."""
import errno
import json
import os
import shutil

import pytest
from conftest import assert_sentence, run

import prepare_fineweb
from common.files import UserError
from data import open_data, parts, sources
from data.shards import Data

datasets = pytest.importorskip('datasets')
pytestmark = pytest.mark.slow
RECORDS = [{'text': f'Document {i} of {"many " * (i % 7)}', 'id': i} for i in range(700)]


@pytest.fixture(scope='module')
def kinds(tmp_path_factory):
    """The same documents as a source of each kind: {its name: its path}."""
    folder = tmp_path_factory.mktemp('kinds')
    for i in range(5):
        some = RECORDS[i * 140:(i + 1) * 140]
        with open(folder / f'{i}.jsonl', 'w') as file:
            file.writelines(json.dumps(record) + '\n' for record in some)
        datasets.Dataset.from_list(some).to_parquet(folder / f'{i}.parquet', batch_size=50)
    datasets.Dataset.from_list(RECORDS).save_to_disk(folder / 'saved')
    return {'json files': f'{folder}/*.jsonl', 'parquet files': f'{folder}/*.parquet', 'saved': f'{folder}/saved'}


def read_part(source, position=sources.START, **settings):
    """[(position, [(split, text)])] of a part of a source."""
    s = prepare_fineweb.Settings(tokenizer='byte', val_share=0.1, **settings)
    return list(sources.batches(sources.open_source(source, s)[0], s, position))


@pytest.mark.parametrize('shuffle', [0, 30])
@pytest.mark.parametrize('n_parts', [2, 5, 7])  # seven parts of five files: by document
@pytest.mark.parametrize('kind', ['json files', 'parquet files', 'saved'])
def test_the_parts_of_a_source_are_each_document_once(kinds, kind, n_parts, shuffle):
    def found(part):
        return [document for _, batch in read_part(kinds[kind], part=part, shuffle=shuffle) for document in batch]
    of_parts = [found(f'{i + 1}/{n_parts}') for i in range(n_parts)]
    assert sorted(document for part in of_parts for document in part) == sorted(found(None))
    assert len(found(None)) == 700 and min(map(len, of_parts)) >= 100


@pytest.mark.parametrize('kind', ['json files', 'parquet files', 'saved'])
@pytest.mark.parametrize('part', ['2/3', '3/7'])
def test_a_part_goes_on_from_every_batch(kinds, kind, part):
    whole = read_part(kinds[kind], part=part)
    for i, (position, batch) in enumerate(whole):
        inside = {**position, 'skip': 2, 'documents': position['documents'] + 2}
        rest = read_part(kinds[kind], inside, part=part)
        assert [batch[2:], *(batch for _, batch in whole[i + 1:])] == [batch for _, batch in rest]


def prepare(source, out, *args):
    return run('prepare_fineweb.py', source, '--tokenizer=byte', '--val_share=0.1', '--shard_tokens=2000',
               '--workers=1', f'--out_dir={out}', *args)


def texts(folder, split):
    """The documents of a split of a data folder, sorted."""
    data = Data(folder)
    ids = data.tokens(split, 0, data.splits[split]['tokens'])
    return sorted(bytes(min(i, 255) for i in ids).split(b'\xff')[:-1])


@pytest.fixture(scope='module')
def two_parts(kinds, tmp_path_factory):
    folder = tmp_path_factory.mktemp('parts')
    for i in (1, 2):
        result = prepare(kinds['json files'], folder / f'part{i}', f'--part={i}/2')
        assert result.returncode == 0 and 'prepare_fineweb.py --merge' in result.stdout, result.stderr
    return folder


def test_merged_parts_are_the_source_and_share_its_tokens(kinds, two_parts, tmp_path):
    assert prepare(kinds['json files'], tmp_path / 'whole').returncode == 0
    shutil.copytree(two_parts, tmp_path / 'parts')
    ours = [tmp_path / 'parts/part2', tmp_path / 'parts/part1']  # in any order
    result = run('prepare_fineweb.py', '--merge', *ours, f'--out_dir={tmp_path}/data')
    assert result.returncode == 0 and 'python train.py' in result.stdout, result.stderr
    shards = [path for path in (tmp_path / 'data').iterdir() if path.suffix in ('.bin', '.crc32')]
    assert len(shards) > 10 and all(path.stat().st_nlink == 2 for path in shards)
    shutil.rmtree(tmp_path / 'parts')
    merged, whole = Data(tmp_path / 'data'), Data(tmp_path / 'whole')
    merged.verify()
    for split in ('train', 'val'):
        assert texts(tmp_path / 'data', split) == texts(tmp_path / 'whole', split)
        assert all(merged.splits[split][key] == whole.splits[split][key] for key in ('tokens', 'documents', 'bytes'))


def test_too_few_for_validation_are_counted_over_all_parts_and_a_limit_is_of_all_parts(tmp_path):
    path = tmp_path / 'few.jsonl'
    path.write_text(''.join(json.dumps(record) + '\n' for record in RECORDS[:40]))
    part_folders = [tmp_path / f'few_part_{i}_of_4' for i in range(1, 5)]
    for i, folder in enumerate(part_folders, 1):
        assert prepare(path, folder, f'--part={i}/4', '--val_share=1e-9').returncode == 0
    assert sum('val' in parts.read_part(folder)['splits'] for folder in part_folders) < 4
    folder, splits = parts.merge_parts([*map(str, part_folders)], '', tmp_path)
    assert folder == tmp_path / 'few' and splits['val']['documents'] == 2 and splits['train']['documents'] == 38

    assert prepare(path, tmp_path / 'half', '--part=1/2', '--max_tokens=401').returncode == 0
    tokens = [info['tokens'] for info in parts.read_part(tmp_path / 'half')['splits'].values()]
    assert 201 <= sum(tokens) < 201 + 60


def test_parts_that_do_not_belong_together_are_a_sentence(kinds, two_parts, tmp_path):
    def merge(*folders):
        before = sorted(tmp_path.iterdir())
        result = run('prepare_fineweb.py', '--merge', *folders, f'--out_dir={tmp_path}/data')
        assert sorted(tmp_path.iterdir()) == before
        return result
    a, b = two_parts / 'part1', two_parts / 'part2'
    assert_sentence(merge(), '--merge needs the folders of all parts')
    assert_sentence(merge(a), 'of 2 parts 1 are not given: 2')
    assert_sentence(merge(a, b, a / '../part2'), 'are both part 2 of 2')
    assert_sentence(merge(a, tmp_path / 'none'), 'none is no part: expected a folder that')
    assert_sentence(run('prepare_fineweb.py', '--merge', a, b, f'--out_dir={b}'), 'part2 exists')
    assert_sentence(run('prepare_fineweb.py', '--merge', a, b, '--shuffle=3'), '--merge is given with --shuffle')

    other = shutil.copytree(b, tmp_path / 'other')
    for change, sentence in (({'source_checksum': 'x'}, 'has source_checksum = '), ({'part': '2/3'}, "'one of 3'"),
                             ({'part': '2/1'}, 'part.json is damaged (part is')):
        record = parts.read_part(b)
        record['arguments'] |= change
        (other / 'part.json').write_text(json.dumps(record))
        assert_sentence(merge(a, other), sentence)
    shutil.copyfile(b / 'part.json', other / 'part.json')
    with open(other / 'train_00001.bin', 'r+b') as file:
        file.write(b'!')
    assert_sentence(merge(a, other), 'train_00001.bin is missing, or does not match its checksum in part.json')
    shutil.copyfile(b / 'train_00001.bin', other / 'train_00001.bin')
    (other / 'train_00001.crc32').write_bytes(b'!' * (b / 'train_00001.crc32').stat().st_size)
    assert_sentence(merge(a, other), 'train_00001.crc32 is damaged')
    (other / 'train_00001.crc32').unlink()
    assert_sentence(merge(a, other), 'train_00001.crc32 is missing')


def test_a_merge_that_cannot_link_or_is_interrupted_leaves_nothing(two_parts, tmp_path, monkeypatch):
    link, n_linked = os.link, []

    def fails(error):
        def link_some(*paths):
            n_linked.append(paths)
            if len(n_linked) == 3:
                raise error
            link(*paths)
        n_linked.clear()
        monkeypatch.setattr(os, 'link', link_some)
        return run('prepare_fineweb.py', '--merge', two_parts / 'part1', two_parts / 'part2',
                   f'--out_dir={tmp_path}/data')
    assert_sentence(fails(OSError(errno.EXDEV, 'Invalid cross-device link')), 'cannot be linked into',
                    'put all parts and --out_dir on one file system')
    assert fails(KeyboardInterrupt()).returncode == 130
    assert not [*tmp_path.iterdir()]


def test_a_part_alone_is_no_data_and_a_wrong_part_is_a_sentence(kinds, two_parts, tmp_path):
    with pytest.raises(UserError, match='is a part of data alone.*--merge'):
        open_data(two_parts / 'part1')
    for part in ('0/2', '3/2', '1', 'x/2', '1/0'):
        assert_sentence(prepare(kinds['json files'], tmp_path / 'out', f'--part={part}'), f'part is {part!r}: expected')
    assert_sentence(prepare(kinds['json files'], two_parts / 'part1', '--part=1/2'), 'complete (it has a part.json)')
    assert not [*tmp_path.iterdir()]


def test_a_saved_dataset_may_have_fewer_documents_than_parts_and_a_format_of_its_own(tmp_path):
    datasets.Dataset.from_list(RECORDS[:3]).save_to_disk(tmp_path / 'few')
    assert [len(read_part(tmp_path / 'few', part=f'{i}/4')) for i in (1, 2, 3, 4)] == [1, 1, 1, 0]
    datasets.Dataset.from_list(RECORDS[:3]).with_format('numpy', columns=['text']).save_to_disk(tmp_path / 'formatted')
    (_, found), = read_part(tmp_path / 'formatted')
    assert [text for _, text in found] == [record['text'] for record in RECORDS[:3]]
