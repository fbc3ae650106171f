"""Settings: what is accepted, and the sentence for what is not."""
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import train
from common import runs
from common.files import UserError
from common.settings import load_settings


def model_config_class(name):
    return runs.model_file(name).Config


@dataclass
class Example:
    model: str = 'standard'  # which model
    count: int = 3  # how many
    rate: float = 0.5  # how fast
    text: str = 'a'  # what
    limit: int | None = None  # at most
    name: str | None = None  # its name
    flag: bool = False  # whether


@pytest.mark.parametrize('arg, name, value', [
    ('--count=20e9', 'count', 20_000_000_000), ('--rate=2', 'rate', 2.0), ('--text=a=b', 'text', 'a=b'),
    ('--text=1', 'text', '1'),
    ('--limit=None', 'limit', None), ('--limit=7', 'limit', 7), ('--flag', 'flag', True),
    ('--flag=false', 'flag', False),
    ('--name=x', 'name', 'x'), ('--name=None', 'name', None), ('--rate=1e-4', 'rate', 1e-4)])
def test_values_take_the_type_of_their_setting(arg, name, value):
    settings, _, given = load_settings(Example, [arg])
    assert getattr(settings, name) == value and given == {name: value}
    assert type(getattr(settings, name)) is type(value)


@pytest.mark.parametrize('arg, sentence', [
    ('--count=2.5', "setting 'count' on the command line is 2.5, a float: expected int"),
    ('--count=x', "setting 'count' on the command line is 'x', a str: expected int"),
    ('--count', '--count needs a value: write --count=VALUE'),
    ('--flag=1', "setting 'flag' on the command line is 1, a int: expected bool"),
    ('--limit=a', "expected int or None"),
    ('--coutn=2', "unknown setting 'coutn' on the command line: did you mean 'count'?"),
    ('--zzzzzz=2', "unknown setting 'zzzzzz' on the command line: run with --help for the list")])
def test_bad_values_are_sentences(arg, sentence):
    with pytest.raises(UserError) as error:
        load_settings(Example, [arg])
    assert sentence in str(error.value)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_config_file_builds_on_another_and_the_command_line_wins(tmp_path):
    path = write(tmp_path / 'mine.py', 'from config.standard_m import *\nimport math\nfrom math import sqrt\n'
                 'n_layer = int(math.sqrt(49))\n_private = 1\ncount = 2e3\n')
    settings, _, given = load_settings(with_warmup(), [path, '--count=5'], config_of=model_config_class)
    assert given == {'n_layer': 7, 'n_head': 16, 'n_embd': 1024, 'warmup_tokens': 100_000_000, 'count': 5}
    assert settings.count == 5


def with_warmup():
    @dataclass
    class Settings(Example):
        warmup_tokens: int = 0  # warm-up
    return Settings


@pytest.mark.parametrize('text, sentence', [
    ('widow = 64', "unknown setting 'widow' in {}: did you mean 'window'?"),
    ('n_layer = "three"', "setting 'n_layer' in {} is 'three', a str: expected int"),
    ('model = "standrd"', "unknown model 'standrd': did you mean 'standard'?"),
    ('model = "../../etc/passwd"', 'unknown model'),
    ('n_layer = 1 +', 'config file {} does not run: SyntaxError')])
def test_config_files_are_checked_like_the_command_line(tmp_path, text, sentence):
    path = write(tmp_path / 'mine.py', text)
    with pytest.raises(UserError) as error:
        load_settings(Example, [path], config_of=model_config_class)
    assert sentence.format(path) in str(error.value)


@pytest.mark.parametrize('path', sorted(p for p in Path('config').rglob('*.py') if p.name != '__init__.py'),
                         ids=lambda p: p.stem)
def test_every_config_file_is_a_model_and_settings(path):
    _, _, given = load_settings(train.Settings, [str(path)], config_of=model_config_class)
    names = {f.name for f in dataclasses.fields(runs.model_file(given.get('model', 'standard')).Config)}
    runs.make_config(given.get('model', 'standard'), {k: v for k, v in given.items() if k in names})


def test_missing_config_file_names_the_nearest():
    with pytest.raises(UserError, match='did you mean config/quickstart.py'):
        load_settings(Example, ['config/quikstart.py'], config_of=model_config_class)


def test_help_lists_every_setting_with_type_default_and_comment(capsys):
    with pytest.raises(SystemExit) as exit:
        load_settings(Example, ['--help'], config_of=model_config_class)
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert '--count=3  (int)\n        how many' in text and '--limit=None  (int | None)' in text
    assert '--window=None' in text and 'positions of the past' in text  # the model's too


# ---- checkpoints ----

@pytest.fixture
def run_folder(tmp_path):
    for step in (1, 2):
        runs.save_checkpoint(tmp_path, step, {'model.safetensors': {'w': torch.full((3,), float(step))}},
                             {'step': step})
    return tmp_path


def load(folder):
    state, files = runs.load_checkpoint(folder, ('model.safetensors',))
    return state['step'], files['model.safetensors']['w'][0].item()


def test_the_newest_whole_checkpoint_is_loaded_and_old_ones_go(run_folder):
    assert load(run_folder) == (2, 2.0)
    runs.save_checkpoint(run_folder, 3, {'model.safetensors': {'w': torch.zeros(3)}}, {'step': 3})
    assert [p.name for p in runs.checkpoints(run_folder)] == ['step_00000003', 'step_00000002']


def test_a_new_checkpoint_outlives_damaged_ones_with_higher_steps(run_folder):
    for step in (8, 9):
        shutil.copytree(run_folder / 'ckpt/step_00000002', run_folder / f'ckpt/step_0000000{step}')
        (run_folder / f'ckpt/step_0000000{step}/model.safetensors').write_bytes(b'')
    runs.save_checkpoint(run_folder, 3, {'model.safetensors': {'w': torch.full((3,), 3.0)}}, {'step': 3})
    assert load(run_folder) == (3, 3.0)
    assert [p.name for p in runs.checkpoints(run_folder)] == ['step_00000003', 'step_00000002']


@pytest.mark.parametrize('name, damage', [
    ('model.safetensors', lambda b: b[:-1]), ('model.safetensors', lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    ('state.json', lambda b: b''),
    ('state.json', lambda b: b.replace(b'2', b'3')), ('SHA256SUMS', lambda b: b[:10]), ('SHA256SUMS', lambda b: b'')])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(run_folder, capsys, name, damage):
    path = run_folder / 'ckpt/step_00000002' / name
    path.write_bytes(damage(path.read_bytes()))
    assert load(run_folder) == (1, 1.0)
    assert 'step_00000002 is damaged' in capsys.readouterr().err


def test_no_whole_checkpoint_is_a_sentence(run_folder):
    for path in run_folder.glob('ckpt/*/model.safetensors'):
        path.unlink()
    with pytest.raises(UserError, match='has no whole checkpoint to load'):
        runs.load_checkpoint(run_folder)


def test_a_pickle_is_never_executed(run_folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / 'executed'), 'w'))
    import hashlib
    import pickle
    for folder in runs.checkpoints(run_folder):
        evil = pickle.dumps(Evil())
        (folder / 'model.safetensors').write_bytes(evil)
        sums = folder / 'SHA256SUMS'
        lines = [line for line in sums.read_text().splitlines() if 'model' not in line]
        sums.write_text('\n'.join([*lines, f'{hashlib.sha256(evil).hexdigest()}  model.safetensors']) + '\n')
    with pytest.raises(UserError):
        load(run_folder)
    assert not (tmp_path / 'executed').exists()


def test_weights_of_another_shape_are_a_sentence():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(UserError, match=r'weight has shape \(3, 4\), the model needs \(3, 2\)'):
        runs.load_weights(model, {'weight': torch.zeros(3, 4), 'bias': torch.zeros(3)}, 'out/x')
    with pytest.raises(UserError, match='bias is only in the model'):
        runs.load_weights(model, {'weight': torch.zeros(3, 2)}, 'out/x')
