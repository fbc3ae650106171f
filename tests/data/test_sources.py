"""Reading files, patterns and folders; training and preparation read texts alike."""
import csv
import gzip
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
from conftest import byte_documents, prepare, prepared, succeeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_architectures import data
from lm_architectures.data.text import sources, splits
from lm_architectures.data.text.shards import Data
from lm_architectures.data.text.writing import hash_fraction, split_of
from lm_architectures.files import UserError, warn_once

pa = pytest.importorskip('pyarrow')
datasets = pytest.importorskip('datasets')
LINES = ['NA', *(f'Line {i} of a long naïve text.' for i in range(399))]


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(data, 'BUILT', tmp_path / 'built')
    return tmp_path / 'built'


def source_of(name, **given):
    return sources.Source(str(name), sources.Reading(**given))


def texts(source, state=None):
    return [found[1] for _, found in source.documents(state) if found]


def assert_resumes(source):
    """Read 23 documents at a time, each time from the JSON of the state before."""
    whole, state = [document for _, document in source.documents()], None
    for i in range(0, len(whole), 23):
        part = [*itertools.islice(source.documents(json.loads(json.dumps(state))), 23)]
        assert [document for _, document in part] == whole[i:i + 23]
        state = part[-1][0]


# ---- formats ----

def write(folder, kind, records, n_files=3):
    """Write records to files of a format, each with an additional column of its own."""
    folder.mkdir(parents=True)
    for i in range(n_files):
        part = [{**record, f'column_{i}': i, 'mixed': i if i % 2 else {'nested': []}}
                for record in records[i * len(records) // n_files:(i + 1) * len(records) // n_files]]
        path, lines = folder / f'{i}.{kind}', ''.join(json.dumps(record) + '\n\n' for record in part)
        if kind == 'parquet':
            pa.parquet.write_table(pa.Table.from_pylist(part), path, row_group_size=50)
        elif kind == 'jsonl.gz':
            path.write_bytes(gzip.compress(lines.encode()))
        elif kind == 'jsonl.zst':  # one frame per line, like concatenated files
            frames = (pa.compress(line, 'zstd', asbytes=True) for line in lines.encode().splitlines(True))
            path.write_bytes(b''.join(frames))
        elif kind == 'csv':
            with open(path, 'w', encoding='utf-8-sig', newline='') as file:
                table = csv.DictWriter(file, part[0])
                table.writeheader()
                table.writerows(part)
        else:
            mark = '\ufeff' if i else ''  # a byte order mark is not text
            path.write_text(mark + (lines if kind == 'jsonl' else json.dumps(part)), encoding='utf-8')


RECORDS = [{'id': str(i), 'text': {7: None, 300: ''}.get(i, line)} for i, line in enumerate(LINES)]
WITH_TEXT = [record['text'] for record in RECORDS if record['text']]


@pytest.fixture(scope='module', params=['jsonl', 'jsonl.gz', 'jsonl.zst', 'json', 'parquet', 'csv'])
def files(request, tmp_path_factory):
    """Make a folder of one format, with a hidden copy, a license and a picture in it."""
    folder = tmp_path_factory.mktemp('files') / 'files'
    write(folder, request.param, RECORDS)
    shutil.copytree(folder, folder / '.cache')
    (folder / 'LICENSE.txt').write_text('Do as you like.')
    (folder / 'map.png').touch()
    return folder, request.param


def test_folders_patterns_and_files_are_read_alike(files):
    folder, kind = files
    by_file = [found for i in range(3) for found in texts(source_of(folder / f'{i}.{kind}'))]
    assert by_file == WITH_TEXT
    assert all(texts(source_of(name)) == by_file for name in (folder, f'{folder}/*.{kind}', f'{folder}/*'))
    assert [found for _, found in source_of(folder).documents()].count(None) == 2  # records without a text
    with pytest.raises(UserError, match=r"field 'body'; fields: id, text, column_0, mixed"):
        texts(source_of(folder, text_field='body'))
    for name, found in ((folder, WITH_TEXT), (folder / f'0.{kind}', texts(source_of(folder / f'0.{kind}')))):
        d = data.open_data(name)  # as train.py reads them
        assert sum(split['documents'] for split in d.splits.values()) == len(found) and d.n_ids == 257


@pytest.mark.parametrize('indent', [None, 1, '\t'])
@pytest.mark.parametrize('name', ['a.ndjson', 'A.JSONL', 'a.json', 'a.JSON.gz'])
def test_records_of_other_tools_are_read(name, indent, tmp_path):
    records = [{'text': line, 'meta': {'at': [{}, i]}} | [{}, {'id': None}, {'id': i}][i % 3]
               for i, line in enumerate(LINES)]
    lines = '\ufeff' + ''.join(json.dumps(record, indent=indent) + '\n' for record in records)
    (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith('.gz') else lines.encode())
    found = [document for _, document in source_of(tmp_path / name).documents() if document]
    assert found == [(str(i) if i % 3 == 2 else line, line) for i, line in enumerate(LINES)]


def test_some_but_not_all_records_may_lack_text(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text('{"id": 1, "body": "a"}\n{"id": 2, "text": null}\n' * 300)
    with pytest.raises(UserError, match="a.jsonl has no text in field 'text'; fields: id, body. Set --text_fi"):
        texts(source_of(path))
    path.write_text(path.read_text() + '{"id": 3, "text": "at last"}\n')
    assert texts(source_of(path)) == ['at last'] and len([*source_of(path).documents()]) == 601


@pytest.mark.parametrize('shuffle', [0, 100])
def test_reading_can_resume_from_any_document(files, shuffle):
    source = source_of(files[0], shuffle=shuffle)
    assert sorted(texts(source)) == sorted(WITH_TEXT)
    assert_resumes(source)


def test_shuffling_mixes_files_and_documents(tmp_path):
    write(tmp_path / 'files', 'jsonl', [{'id': i, 'text': line} for i, line in enumerate(LINES)], n_files=8)
    order = [LINES.index(text) for text in texts(source_of(tmp_path / 'files', shuffle=250))]
    assert sorted(order) == [*range(400)] and sum(b == a + 1 for a, b in zip(order, order[1:])) < 20
    assert len({i // 50 for i in order[:50]}) > 2 and len({i // 50 for i in order[:250]}) == 5  # a block: 5 files


@pytest.mark.parametrize('kind', ['saved', 'saved dict', 'arrow'])
def test_other_formats_are_read_with_the_datasets_library(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'BATCH', 30)
    found = datasets.Dataset.from_list([{'id': str(i), 'text': line, 'other': i} for i, line in enumerate(LINES)])
    if kind == 'arrow':
        found.save_to_disk(tmp_path / 'saved')
        (tmp_path / 'source').mkdir()
        shutil.copy(next((tmp_path / 'saved').glob('*.arrow')), tmp_path / 'source/a.arrow')
    else:
        found = found.with_format('numpy')  # the format is saved, too
        (datasets.DatasetDict(train=found) if kind == 'saved dict' else found).save_to_disk(tmp_path / 'source')
    assert texts(source_of(tmp_path / 'source')) == LINES
    assert_resumes(source_of(tmp_path / 'source'))
    if kind != 'saved':
        with pytest.raises(UserError, match='could not be opened'):
            source_of(tmp_path / 'source', split='test')


def test_a_copy_of_a_dataset_is_read_with_its_configurations(tmp_path, monkeypatch):
    """By the library, which reads the text and the id only: other columns differ between files."""
    monkeypatch.setattr(sources, 'BATCH', 30)
    write(tmp_path / 'files', 'parquet', RECORDS)
    (tmp_path / 'files/README.md').write_text('---\nconfigs:\n- config_name: all\n  data_files: "*.parquet"\n---\n')
    assert texts(source_of(tmp_path / 'files', config='all')) == WITH_TEXT
    assert_resumes(source_of(tmp_path / 'files', config='all', shuffle=100))
    with pytest.raises(UserError, match='could not be opened'):
        source_of(tmp_path / 'files', config='other')


# ---- texts ----

@pytest.mark.parametrize('is_single', [True, False])
def test_training_and_preparation_read_texts_alike(is_single, tmp_path, built, capsys):
    """The end of a single text is validation data; else each file is a document."""
    folder = tmp_path / 'texts'
    (folder / 'more').mkdir(parents=True)
    (folder / 'blank.txt').write_text('\n')
    whole = '\n'.join(LINES)
    for i, line in enumerate([whole] if is_single else LINES):
        (folder / ('more' if i % 2 else '') / f'{i}.txt').write_text('\ufeff' + line, encoding='utf-8')
    if is_single:
        (folder / 'blank.txt').unlink()
    d = data.open_data(str(folder))
    prepared(folder, tmp_path / 'out', '--val_fraction=0.05')
    train, val = (byte_documents(d.folder, split) for split in ('train', 'val'))
    assert [byte_documents(tmp_path / 'out', split) for split in ('train', 'val')] == [train, val]
    if is_single:
        assert train[0] + val[0] == whole and len(train) == len(val) == 1 and 0.09 < len(val[0]) / len(whole) < 0.11
        assert capsys.readouterr().out.count('single text: its last 10% are the validation data') == 1
        assert data.open_data(str(folder / '0.txt')).sha256 == d.sha256
    else:
        assert sorted(train + val) == sorted(LINES) and 10 <= len(val) < 100
    assert data.open_data(str(folder)).sha256 == d.sha256 and len([*built.glob('texts-*')]) == 1
    (folder / '0.txt').write_text('Another text.')  # makes it different data
    assert data.open_data(str(folder)).sha256 != d.sha256 and len([*built.glob('texts-*')]) == 2


STORIES = [f'Once there was a cat, number {i}.\nIt was <|happy|>.' for i in range(40)]


@pytest.mark.parametrize('marker', ['<|endoftext|>', '</s>'])
def test_literal_end_of_text_markers_are_reported_and_can_split_documents(marker, tmp_path, capfd):
    warn_once.cache_clear()
    (tmp_path / 'stories.txt').write_text(f'\n{marker}\n'.join(STORIES) + marker)
    assert texts(source_of(tmp_path / 'stories.txt', split_at=marker)) == STORIES and capfd.readouterr().err == ''
    lines = (tmp_path / 'stories.txt').read_text().splitlines()
    assert texts(source_of(tmp_path / 'stories.txt', split_lines=True)) == list(filter(None, lines))
    assert len(texts(source_of(tmp_path / 'stories.txt'))) == 1
    assert capfd.readouterr().err.count(f"--split_at='{marker}'") == 1


@settings(max_examples=200, deadline=None)
@given(text=st.text('ab\n', max_size=40), size=st.integers(1, 5),
       marker=st.sampled_from(['\n', '\n\n\n', 'a\nb', 'aba']))
def test_a_marker_of_several_lines_is_found_across_chunks_and_reading_is_lazy(text, size, marker):
    chunks = [text[i:i + size] for i in range(0, len(text), size)]
    whole = [part.strip('\n') for part in text.split(marker)]
    assert [*sources.split_at_marker(chunks, marker)] == whole
    endless = sources.split_at_marker(itertools.chain(chunks, itertools.repeat(f'b{marker}b')), marker)
    assert [*itertools.islice(endless, len(whole) - 1)] == whole[:-1]


# ---- options ----

OPTIONS = {'config': 'all', 'split': 'test', 'text_field': 'body', 'id_field': 'key', 'split_lines': True,
           'split_at': '\r\n*\n', 'val_fraction': 0.3, 'val_hash': 'md5', 'shuffle': 50}
REFUSED = {'txt': ('config', 'split', 'text_field', 'id_field'), 'hub': ('split_lines', 'split_at'),
           'saved': ('config', 'split', 'split_lines', 'split_at'),
           **dict.fromkeys(('jsonl', 'csv', 'parquet'), ('config', 'split', 'split_lines', 'split_at'))}


@pytest.mark.parametrize('kind', REFUSED)
def test_each_option_changes_what_is_read_or_is_refused(kind, tmp_path):
    records = [{'id': i, 'key': -i, 'text': f'{i}\nb\n*\nc', 'body': line} for i, line in enumerate(LINES)]
    name, base = tmp_path / 'files', {'config': 'one'} if kind == 'hub' else {}
    if kind == 'saved':
        datasets.Dataset.from_list(records).save_to_disk(name)
    elif kind == 'txt':
        name.mkdir()
        for record in records[:60]:
            (name / f'{record["id"]}.txt').write_text(record['text'])
    else:
        write(name, 'parquet' if kind == 'hub' else kind, records)
        (name / 'README.md').write_text('---\nconfigs:\n' + ''.join(
            f'- config_name: {config}\n  data_files:\n  - split: train\n    path: "{path}.parquet"\n'
            f'  - split: test\n    path: 1.parquet\n' for config, path in (('one', '0'), ('all', '*'))) + '---\n')
    name = name if kind in ('hub', 'saved') else f'{name}/*'  # with --config, the library reads a folder

    def outcome(**given):
        source = source_of(name, **base | given)
        return [parts for _, parts in splits.split_documents(source, *splits.fitting_split(source))]
    default = outcome()
    for option, value in OPTIONS.items():
        if option in REFUSED[kind]:
            with pytest.raises(UserError, match=f"{option}|could not be opened .KeyError.: '{value}'"):
                sources.check_options(source_of(name, **{option: value}))
        else:
            sources.check_options(source_of(name, **base | {option: value}))
            assert outcome(**{option: value}) != default, option
    with pytest.raises(UserError, match='split_lines'):
        sources.check_options(source_of(name, split_lines=True, split_at='x'))


# ---- which documents are validation data ----

def source_with_ids(ids, **given):
    s = sources.Reading(**given)
    return SimpleNamespace(s=s, documents=lambda state=None: [
        ({}, (str(key), line)) for key, line in zip(ids, itertools.cycle(LINES))])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(n=st.integers(2, 600), fraction=st.sampled_from([1e-9, 0.001, 0.02, 0.5]),
       val_hash=st.sampled_from(['md5', 'sha256']))
def test_val_fraction_is_raised_only_as_far_as_needed(n, fraction, val_hash):
    source = source_with_ids(range(n), val_fraction=fraction, val_hash=val_hash)
    fitting, by_text = splits.fitting_split(source)
    n_val = sum(split_of(str(i), fitting, val_hash) == 'val' for i in range(n))
    enough = min(10, max(1, n // 20))
    if fitting == fraction:
        assert n_val >= enough
    else:
        assert n_val == enough and sum(hash_fraction(str(i), val_hash) < fraction for i in range(n)) < enough


@pytest.mark.parametrize('n_ids, n_val, said', [(90, 4, ''), (3, 30, '90 documents have 3 in field'),
                                                (1, 4, '90 documents have 1 in field')])
def test_repeated_ids_are_reported_and_fractions_count_documents(n_ids, n_val, said, capsys):
    """5% of the documents are validation data, or all of an id."""
    source = source_with_ids([i % n_ids for i in range(90)], val_fraction=1e-9)
    fitting = splits.fitting_split(source)
    assert [split for _, [(split, _)] in splits.split_documents(source, *fitting)].count('val') == n_val
    found = capsys.readouterr().out
    assert said in found and ('repeated ids' in found) == (said != '')
    assert 'leaves 0 of 90 documents for validation: raised to 0.' in found and f'which leaves {n_val}\n' in found


def test_val_fraction_considers_only_documents_within_max_tokens(tmp_path):
    write(tmp_path / 'files', 'jsonl', RECORDS)
    result = succeeded(prepare(tmp_path / 'files', tmp_path / 'out', '--max_tokens=1000', '--val_fraction=0.03'))
    assert "1 records without text in field 'text' were skipped" in result.stdout  # only of those read
    splits = Data(tmp_path / 'out').splits
    assert splits['val']['documents'] >= 1 and 1000 <= sum(split['tokens'] for split in splits.values()) < 1100
    assert not any(split_of(str(i), 0.03) == 'val' for i in range(40))  # which is why it was raised


# ---- sources that cannot be read ----

RECORD = b'{"text": "a", "id": 1}\n'
MANY = gzip.compress(b''.join(b'{"text": "%d", "id": 1}\n' % (i * i) for i in range(5000)))


@pytest.mark.parametrize('name, content, sentence', [
    ('a.parquet', b'PAR1 and nothing else', 'a.parquet cannot be read after 0 rows (ArrowInvalid)'),
    ('a.jsonl', RECORD * 400 + b'{"text": "a", ', 'a.jsonl cannot be read after 400 lines (JSONDecodeError)'),
    ('a.jsonl', RECORD + b'[1, 2]\n', 'a.jsonl, line 2 is [1, 2]: expected an object with fields, {"text": ...}'),
    ('a.jsonl', RECORD + b'{"text": 5, "id": 1}\n', "a.jsonl, line 2 has 5 in field 'text': expected text"),
    ('a.jsonl', b'{\n"text": "a"\n}\n{\n"text": "b",\n', 'a.jsonl cannot be read after 3 lines (JSONDecodeError)'),
    ('a.json', b'[{"text": "a"}, {"text": 5}]', "a.json, item 2 has 5 in field 'text': expected text"),
    ('a.csv', b'id,text\n1,a\n2,b, c\n', 'a.csv cannot be read after 1 rows (ValueError): row 2 has 3 cells'),
    ('a.csv', b'id,text\n1,a\n\n2,b\n3\n', 'a.csv cannot be read after 2 rows (ValueError): row 3 has 1 cells'),
    ('a.csv', b'id,text\n1,a\n2,"b\n3,c\n', 'a.csv cannot be read after 1 rows (Error): unexpected end of data'),
    ('a.jsonl.gz', MANY[:5000] + b'flip' + MANY[5004:], 'a.jsonl.gz cannot be read after '),
    ('a.txt', b'ab\xff', 'a.txt cannot be read after 0 documents (UnicodeDecodeError)'),
    ('docs/page.md', b'# A page', 'docs/page.md: expected files of one format'),
])
def test_unreadable_sources_are_reported_with_file_and_line(tmp_path, name, content, sentence):
    (tmp_path / 'docs').mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(sentence)):
        texts(source_of(tmp_path / name.removesuffix('/page.md')))
