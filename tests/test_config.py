"""Settings from the command line, config files and config.json, and errors for bad ones."""
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import ROOT

import train
from lm_architectures.files import UserError, command
from lm_architectures.run import folders, models, run_settings
from lm_architectures.settings import load_settings, read_config_file


@dataclass
class Example:
    model: str = 'standard'  # which model
    count: int = 3  # how many
    rate: float = 0.5  # how fast
    text: str = 'a'  # some text
    limit: int | None = None  # largest count
    name: str | None = None  # a name
    flag: bool = False  # a switch
    shape: Literal['round', 'square'] | None = 'round'  # a shape
    sizes: tuple[int, ...] = (1, 2)  # some sizes
    rates: tuple[float, ...] | None = None  # some rates
    lengths: tuple[int | Literal['auto'], ...] = ('auto',)  # some lengths


@pytest.mark.parametrize('arg, name, value', [
    ('--count=20e9', 'count', 20_000_000_000), ('--rate=2', 'rate', 2.0), ('--rate=1e-4', 'rate', 1e-4),
    ('--text=a=b', 'text', 'a=b'), ('--text=1', 'text', '1'), ('--limit=None', 'limit', None),
    ('--limit=7', 'limit', 7), ('--flag', 'flag', True), ('--flag=false', 'flag', False), ('--name=x', 'name', 'x'),
    ('--name=None', 'name', None), ('--shape=square', 'shape', 'square'), ('--shape=None', 'shape', None),
    ('--rate=-4.0', 'rate', -4.0), ('--count=-3', 'count', -3), ('--limit=-1', 'limit', -1),
    ('--sizes=1,2,4', 'sizes', (1, 2, 4)), ('--sizes=(3,)', 'sizes', (3,)), ('--sizes=', 'sizes', ()),
    ('--rates=-1,2e-3', 'rates', (-1.0, 0.002)), ('--rates=None', 'rates', None),
    ('--lengths=1, auto', 'lengths', (1, 'auto'))])
def test_values_take_the_type_of_their_setting(arg, name, value):
    settings, _, given = load_settings(Example, [arg])
    assert getattr(settings, name) == value and given == {name: value}
    assert type(getattr(settings, name)) is type(value)


@pytest.mark.parametrize('arg, sentence', [
    ('--count=2.5', "count is '2.5' on the command line: expected int"),
    ('--count=x', "count is 'x' on the command line: expected int"),
    ('--count', 'count is True on the command line: expected int; write --count=VALUE'),
    ('--flag=1', "flag is '1' on the command line: expected bool"),
    ('--coutn=2', "unknown setting 'coutn' on the command line: did you mean 'count'?"),
    ('--zzzzzz=2', "unknown setting 'zzzzzz' on the command line: run with --help for the list"),
    ('--name=', "name is '' on the command line: expected str or None"),
    ('--count=' + '[' * 5000, "count is '[[["),
    ('--sizes=1,x', "sizes is '1,x' on the command line: expected int separated by commas"),
    ('--sizes', 'sizes is True on the command line: expected int separated by commas; write --sizes=VALUE'),
    ('--lengths=4,aut', "expected int or 'auto' separated by commas"),
    ('--rates=1,nan', 'rates is '), ('--rate=--4', "rate is '--4'"),
    ('--shape=squar', "expected 'round', 'square' or None; did you mean 'square'?"),
    ('--count=\0', 'expected int'),
    *((f'--{name}={number}', f'{name} is ') for name in ('count', 'rate', 'limit') for number in (
        'nan', 'inf', '-1e400', '1e18', '-1e18', '9' * 40, '9' * 5000))])
def test_bad_values_give_a_clear_error(arg, sentence):
    with pytest.raises(UserError) as error:
        load_settings(Example, [arg])
    assert sentence in str(error.value)


def test_config_files_can_import_another_and_the_command_line_wins(tmp_path):
    """Then settings that only the file's model has are left out."""
    path, before = tmp_path / 'mine.py', {*sys.modules}
    path.write_text('from config.gpn_small import *\nimport math\nfrom math import sqrt\n'
                    'n_layer = int(math.sqrt(49))\n_private = 1\nseed = 2e3\n')
    s, values, _ = run_settings.read_settings(train.Settings, [str(path), '--seed=5', '--model=standard'])
    assert (s.model, s.seed, values['n_layer'], s.block_size) == ('standard', 5, 7, 256) and 'd_emb' not in values
    assert not any(name.partition('.')[0] == 'config' for name in sys.modules.keys() - before)


@pytest.mark.parametrize('text, sentence', [
    ('widow = 64', "unknown setting 'widow' in {}: did you mean 'window'?"),
    ('n_layer = "three"', "n_layer is 'three' in {}: expected int"),
    ('model = "standrd"', "unknown model 'standrd': did you mean 'standard'?"),
    ('model = "../../etc/passwd"', 'unknown model'),
    ('n_layer = 1 +', 'config file {} does not run: SyntaxError'),
    ('learning_rate = float("nan")', 'learning_rate is nan in {}'),
    ('import torch\nbeta1 = torch.ones(())', "beta1 is tensor(1.) in {}: expected float")])
def test_config_files_are_checked_like_the_command_line(tmp_path, text, sentence):
    path = tmp_path / 'mine.py'
    path.write_text(text)
    with pytest.raises(UserError) as error:
        run_settings.read_settings(train.Settings, [str(path)])
    assert sentence.format(path) in str(error.value)


@pytest.mark.parametrize('path', sorted(p for p in Path('config').rglob('*.py') if p.name != '__init__.py'),
                         ids=lambda p: p.stem)
def test_every_config_file_loads(path):
    s, values, _ = run_settings.read_settings(train.Settings, [str(path)])
    models.make_config(s.model, {'eos_id': None, 'n_ids': 257} | values)  # the first two are from the data


def test_sps_runs_decay_and_evaluate_like_the_official_code():
    s40, s100 = (run_settings.read_settings(train.Settings, args)[0] for args in (
        ['config/standard_s.py', '--max_tokens=40e9'], ['config/standard_xl.py', '--max_tokens=100e9']))
    for s, decay in ((s40, 36e9), (s100, 90e9)):
        tokens_per_step = s.tokens_per_step
        assert 0 <= decay - s.last_before_decay * tokens_per_step < tokens_per_step
        assert train.learning_rate(s, decay) == pytest.approx(6e-4) and train.learning_rate(s, 1.01 * decay) < 5.8e-4
        assert s.eval_interval * tokens_per_step == pytest.approx(40e6, rel=0.01)
        assert (s.eval_tokens, s.eval_seed) == (10_000_000, 42)
    assert '--max_tokens=10e9 --eval_interval=51 ' in (ROOT / 'papers/sps/rows.csv').read_text()  # 20M tokens


def test_a_missing_config_file_suggests_the_nearest_in_any_working_directory(tmp_path, monkeypatch):
    for folder in ('', '..', tmp_path):
        monkeypatch.chdir(ROOT / folder)
        with pytest.raises(UserError, match='did you mean .*config/quickstart.py'):
            read_config_file('config/quikstart.py')


def test_printed_commands_work_in_the_current_directory(tmp_path, monkeypatch):
    assert command('sample.py', 'out/a b', '--x') == "python sample.py 'out/a b' --x"
    monkeypatch.chdir(tmp_path)
    assert command('-m', 'analysis', 'a') == f'PYTHONPATH={os.path.relpath(ROOT)} python -m analysis a'


def test_help_lists_every_setting_with_type_default_and_comment(capsys):
    for read, Settings in ((load_settings, Example), (run_settings.read_settings, train.Settings)):
        with pytest.raises(SystemExit, match='0'):
            read(Settings, ['--help'])
    text = capsys.readouterr().out
    assert '--count=3  (int)\n        how many' in text and '--limit=None  (int or None)' in text
    assert "--shape='round'  ('round', 'square' or None)" in text
    assert '--window=None' in text and 'past positions' in text  # model settings, too


# ---- config.json ----

@pytest.mark.parametrize('place', ['model', 'settings', 'model_config', 'data', 'settings.block_size', 'data.tokenizer',
                                   'data.n_ids', 'data.eos_id', 'data.sha256', *folders.OPTIONAL_KEYS])
def test_missing_or_bad_fields_of_config_json_are_named(tmp_path, place):
    record = {'model': 'standard', 'settings': {'block_size': 32, 'eval_seed': None}, 'model_config': {},
              'data': {'tokenizer': 'byte', 'n_ids': 257, 'eos_id': 256, 'bos': False, 'sha256': ''}, 'versions': {}}
    (tmp_path / 'config.json').write_text(json.dumps(record))
    assert folders.read_run(tmp_path) == record | {'code': None}
    part, _, key = place.rpartition('.')
    owner = record[part] if part else record
    values = [owner | {key: []}, owner | {key: None}, {name: owner[name] for name in owner if name != key}]
    for damaged in values[:2] if place in folders.OPTIONAL_KEYS else values:
        (tmp_path / 'config.json').write_text(json.dumps(record | {part: damaged} if part else damaged))
        with pytest.raises(UserError, match=key):
            folders.read_run(tmp_path)
