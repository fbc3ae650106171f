"""What a run inherits: --extend continues from before the decay; settings by --init_from."""
import dataclasses
import json
import shutil

import pytest
from conftest import STEP_TOKENS, assert_sentence, config_json, contents, losses, run, succeeded, train_tiny

import train
from lm_architectures.files import UserError
from lm_architectures.run import folders, models, run_settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def short(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp('extend') / 'short'
    succeeded(train_tiny(tiny_data, out, '--keep_checkpoints=2', '--save_interval=1', steps=20))
    return out


def extend(source, out, steps, *more):
    return run('train.py', f'--extend={source}', f'--out_dir={out}', f'--max_tokens={steps * STEP_TOKENS}', *more)


def test_an_extended_run_equals_a_long_run_bitwise(short, tiny_data, tmp_path):
    succeeded(train_tiny(tiny_data, tmp_path / 'whole', steps=40))
    source = shutil.copytree(short, tmp_path / 'short')
    its_config = config_json(source)
    its_config['settings']['init_from'] = '/gone'  # as if the source had started from another run
    (source / 'config.json').write_text(json.dumps(its_config))
    before = contents(source)
    assert 'from step 18' in succeeded(extend(source, tmp_path / 'longer', 40)).stdout
    assert losses(tmp_path / 'longer') == losses(tmp_path / 'whole') and len(losses(tmp_path / 'longer')) == 40
    assert contents(source) == before
    record = config_json(tmp_path / 'longer')['settings']
    assert record['extend'] == str(source) and record['max_tokens'] == 40 * STEP_TOKENS
    resume = ['train.py', f'--out_dir={tmp_path / "longer"}', '--resume']
    shutil.rmtree(tmp_path / 'longer/ckpt')
    log = tmp_path / 'longer/log.jsonl'  # killed before its first checkpoint: starts from the source again
    log.write_text(log.read_text().partition('{"saved"')[0])
    assert 'from step 18' in succeeded(run(*resume)).stdout
    assert losses(tmp_path / 'longer') == losses(tmp_path / 'whole')
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / 'longer/ckpt/step_00000040')
    assert 'from step 39' in succeeded(run(*resume)).stdout
    assert losses(tmp_path / 'longer') == losses(tmp_path / 'whole')


def test_extending_a_constant_schedule_starts_from_the_newest_checkpoint(tiny_data, tmp_path):
    succeeded(train_tiny(tiny_data, tmp_path / 'a', '--schedule=constant', steps=6))
    succeeded(train_tiny(tiny_data, tmp_path / 'whole', '--schedule=constant', steps=9))
    assert 'from step 6' in extend(tmp_path / 'a', tmp_path / 'b', 9).stdout
    want, got = losses(tmp_path / 'whole'), losses(tmp_path / 'b')
    assert [loss for loss, *_ in got.values()] == [loss for loss, *_ in want.values()] and len(got) == 9


def test_runs_that_cannot_be_extended_give_a_clear_error(short, tmp_path):
    assert_sentence(extend(short, tmp_path / 'new', 20), 'has max_tokens = 2560: set --max_tokens to more')
    assert_sentence(extend(short, short, 40), 'needs a new run folder: add --out_dir=NEW')
    assert_sentence(extend(short, tmp_path / 'new', 40, '--seed=3'), 'has seed = 1337, but 3 was given')
    early = shutil.copytree(short, tmp_path / 'early')
    shutil.rmtree(early / 'ckpt/step_00000018')
    assert_sentence(extend(early, tmp_path / 'new', 40), 'from before its decay', 'after step 18: train a new run')
    cosine = shutil.copytree(short, tmp_path / 'cosine')
    text = (cosine / 'config.json').read_text()
    (cosine / 'config.json').write_text(text.replace('"wsd"', '"cosine"'))
    assert_sentence(extend(cosine, tmp_path / 'new', 40), 'has schedule = cosine')
    assert not (tmp_path / 'new').exists()
    assert extend(short, tmp_path / 'new', 40, '--dry_run').returncode == 0 and not (tmp_path / 'new').exists()


@pytest.mark.parametrize('source, target, taken', [
    ('sps', 'standard', False), ('standard', 'sps', False), ('fork', 'standard', False), ('standard', 'fork', False),
    ('standard', 'context_ready', True), ('sps', 'fork', True), ('sps', 'sps', True)])
def test_init_from_takes_over_what_both_models_mean_alike(source, target, taken, tmp_path, monkeypatch):
    """A copy of model_sps.py behaves like the original."""
    model_file = models.model_file
    for module in (models, folders):
        monkeypatch.setattr(module, 'model_file', lambda name, *_: model_file('sps' if name == 'fork' else name))
    config = models.make_config(source, {'n_head': 2, 'n_embd': 16, 'window': 7, 'norm_eps': 1e-3})
    record = {'model': source, 'code': None, 'model_config': dataclasses.asdict(config)}
    monkeypatch.setattr(folders, 'read_run', lambda folder, code: record)

    def settings(model):
        return run_settings.read_settings(train.Settings, [f'--model={model}', '--init_from=out/a'])[1]
    values = settings(target)
    assert values['norm_eps'] == 1e-3 and (values.get('window') == 7) == taken
    if source == 'standard':
        with pytest.raises(UserError, match='it has window = 7, but model_nextlat has no window'):
            settings('nextlat')
