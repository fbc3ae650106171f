"""A run owns its tokenizer: a copy of the file, and what it is, not where it lay."""
import shutil

import pytest
from conftest import assert_sentence, config_json, run, train_tiny

from common import llama, runs
from common.files import UserError
from data import Data, write_data
from data.shards import document_ids, keep_tokenizer
from data.tokenizers import load_tokenizer, train_tokenizer
from sample import load_draft

TEXTS = ['a text of some words', 'and words of a text'] * 40


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    """Two tokenizer.json of one size, and data made with the first."""
    folder = tmp_path_factory.mktemp('tokenizers')
    (folder / 'own.json').write_text(train_tokenizer(TEXTS, 260))
    (folder / 'other.json').write_text(train_tokenizer([text[::-1] for text in TEXTS], 260))
    for name in ('own', 'other'):
        write_data(folder / name, load_tokenizer(folder / f'{name}.json'),
                   [('val' if i % 4 == 0 else 'train', text) for i, text in enumerate(TEXTS)])
    return folder


@pytest.fixture(scope='module')
def trained(tokenizers, tmp_path_factory):
    out = tmp_path_factory.mktemp('run') / 'run'
    result = train_tiny(tokenizers / 'own', out, steps=2)
    assert result.returncode == 0, result.stderr
    return out


def test_a_copied_run_samples_without_its_data_and_resumes_where_the_data_were_moved(trained, tokenizers, tmp_path,
                                                                                     monkeypatch):
    assert (trained / 'tokenizer.json').read_bytes() == (tokenizers / 'own.json').read_bytes()
    assert config_json(trained)['data']['tokenizer'] == 'tokenizer.json'
    copy, data = shutil.copytree(trained, tmp_path / 'copy'), shutil.copytree(tokenizers / 'own', tmp_path / 'moved')
    record = (copy / 'config.json').read_text().replace(str(tokenizers), '/gone')
    (copy / 'config.json').write_text(record)
    assert run('sample.py', copy, 'a text', '--max_new_tokens=3').returncode == 0
    monkeypatch.chdir(tmp_path)
    for name in (data, 'moved'):
        assert run('eval.py', copy, '--val', f'--data={name}').returncode == 0
        assert run('train.py', f'--out_dir={copy}', '--resume', f'--data={name}').returncode == 0


def test_a_dry_run_without_the_data_names_the_tokenizer_of_its_source(trained, tmp_path):
    result = train_tiny(tmp_path / 'gone', tmp_path / 'new', f'--init_from={trained}', '--dry_run')
    assert f' --tokenizer={trained}/tokenizer.json ' in result.stdout, result.stderr
    assert_sentence(train_tiny(tmp_path / 'typo.txt', tmp_path / 'new', '--dry_run'), 'typo.txt')


def test_what_needs_one_tokenizer_compares_its_content(trained, tokenizers, tmp_path):
    record = runs.read_run(trained)
    other = Data(tokenizers / 'other')
    assert other.n_ids == record['data']['n_ids']
    with pytest.raises(UserError, match='use data with the same tokenizer'):
        runs.run_data(record, str(tokenizers / 'other'))
    assert_sentence(train_tiny(other.folder, tmp_path / 'new', f'--init_from={trained}'), 'with the same tokenizer')
    load_draft(shutil.copytree(trained, tmp_path / 'draft'), record, 'cpu', 'float32')
    draft = {'tokenizer': other.tokenizer, 'n_ids': other.n_ids, 'eos_id': other.eos_id}
    with pytest.raises(UserError, match='they must have one tokenizer'):
        load_draft(trained, {'data': draft}, 'cpu', 'float32')


def test_gpt2_is_gpt2_by_name_and_from_files(trained, tmp_path):
    """Its two files are compared with those that OpenAI published when they are loaded."""
    folder, out = tmp_path / 'vocabulary', tmp_path / 'run'
    folder.mkdir()
    for name in ('encoder.json', 'vocab.bpe'):
        (folder / name).write_text(name)
    record = runs.read_run(trained)
    data = {'tokenizer': str(folder), 'n_ids': 50257, 'eos_id': 50256}
    runs.save_run(out, {**record, 'data': {**data, 'bos': False, 'sha256': ''}})
    shutil.rmtree(folder)
    saved = runs.read_run(out)['data']
    assert saved['tokenizer'] == f'{out}/gpt2_vocabulary' and (out / 'gpt2_vocabulary/vocab.bpe').is_file()
    assert runs.same_vocabulary(saved, {**data, 'tokenizer': 'gpt2'})
    assert not runs.same_vocabulary(saved, {**data, 'tokenizer': 'byte'})


def test_a_kill_before_config_json_is_written_leaves_a_folder_for_a_run_and_a_tokenizer_alone_is_none(tmp_path):
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(UserError, match='is not a run folder'):
        runs.check_out_dir(tmp_path, True)
    (tmp_path / '.lock').touch()
    runs.check_out_dir(tmp_path, False)


def test_a_tokenizer_that_is_damaged_or_missing_is_a_sentence(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / 'run')
    (out / 'tokenizer.json').write_text('{}')
    assert_sentence(run('sample.py', out, 'a'), f'{out}/tokenizer.json')
    (out / 'tokenizer.json').unlink()
    assert_sentence(run('sample.py', out, 'a'), f'{out}/tokenizer.json')


def test_a_tokenizer_goes_to_hugging_face_and_comes_back(trained, tmp_path):
    plain = shutil.copytree(trained, tmp_path / 'run')
    llama.export_llama(plain, tmp_path / 'llama')
    assert (tmp_path / 'llama/tokenizer.json').read_bytes() == (trained / 'tokenizer.json').read_bytes()
    assert run('eval.py', tmp_path / 'llama', f'--from_llama={tmp_path}/back').returncode == 0
    shutil.rmtree(tmp_path / 'llama')
    assert run('sample.py', tmp_path / 'back', 'a text', '--max_new_tokens=3').returncode == 0
    assert runs.same_vocabulary(runs.read_run(tmp_path / 'back')['data'], runs.read_run(trained)['data'])


def test_a_folder_named_like_a_tasks_symbols_is_no_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a5').mkdir()
    assert keep_tokenizer(tmp_path / 'run', 'a5') == 'a5'


def test_text_that_spells_an_end_of_document_does_not_end_one(tmp_path):
    """Also with a tokenizer in whose vocabulary it is a piece like others."""
    tokenizers = pytest.importorskip('tokenizers')
    fast = tokenizers.Tokenizer(tokenizers.models.Unigram(
        [('<unk>', 0.0), ('</s>', 0.0), *((c, -3.0) for c in '</s>ab\u2581')], unk_id=0))
    fast.pre_tokenizer, fast.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    fast.add_special_tokens(['</s>'])
    fast.save(str(tmp_path / 'tokenizer.json'))
    own = load_tokenizer(tmp_path / 'tokenizer.json')
    assert document_ids(own, 'a </s> b').tolist().count(own.eos_id) == 1


def test_texts_to_learn_from_may_be_odd_but_must_be_texts(tmp_path):
    texts = tmp_path / 'texts.jsonl'
    texts.write_text('{"text": "\\ud800x"}\n')
    assert run('-m', 'data.tokenizers', texts, f'--out={tmp_path / "a.json"}', '--vocab_size=257').returncode == 0
    texts.write_text('{"text": null}\n')
    assert_sentence(run('-m', 'data.tokenizers', texts, f'--out={tmp_path / "b.json"}', '--vocab_size=257'), 'line 1')
