"""A copy of a model file behaves like the original, and a run keeps the code of its model."""
import importlib.util
import inspect
import json
import pickle
import py_compile
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import NO_SIZES, ROOT, assert_sentence, make_run, run, succeeded
from safetensors.torch import load_file

import attn_kernels
import scans
import train as train_script
from lm_architectures.files import UserError
from lm_architectures.run import folders, models, records
from lm_architectures.run.checkpoint import checkpoints, load_checkpoint

pytestmark = pytest.mark.slow

SIZES = {
    'gpn': ('--n_layer=1', '--n_head=2', '--n_embd=24', '--d_emb=16', '--d_k=8', '--d_v=12'),
    'gdn': ('--n_layer=2', '--n_head=2', '--n_embd=24', '--d_k=8', '--d_v=12', '--chunk_len=8'),
    'context_ready': ('--n_layer=2', '--n_head=2', '--n_embd=32', '--K=3'),
    'sps': ('--n_layer=2', '--n_head=2', '--n_embd=32', '--window=5')}
OTHERS = ('--n_layer=2', '--n_head=2', '--n_embd=32')
ANALYSES = {  # of the model's paper, with options for tiny runs
    'sps': (['sps.restricted_state', '--omega=3', '--n_documents=4', '--block_size=16'],
            ['sps.gradient_flow', '--n_documents=2', '--positions=2', '--block_size=16', '--max_k=4']),
    'standard': (['sps.restricted_state', '--omega=3', '--n_documents=4', '--block_size=16'],),
    'context_ready': (['context_ready.unrolls', '--tokens=64'],),
    'nextlat': (['nextlat.probes', '--offsets=2', '--steps=2', '--eval_tokens=64'],),
    'gpn': (['gpn.state', '--batches=2', '--batch_size=2', '--unigram_tokens=1000'],)}
HOSTILE = 'raise SystemExit("imported")'
SHORT = (*NO_SIZES, '--max_tokens=512')  # four steps


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Yield a folder with the model files, which takes the place of the repository."""
    folder = tmp_path / 'repository'
    folder.mkdir()
    for path in (ROOT / 'attn_kernels.py', ROOT / 'state_cache.py', *ROOT.glob('model_*.py')):
        shutil.copy(path, folder)
    monkeypatch.setattr(models, 'ROOT', folder)
    yield folder
    models.ADDED.clear()


def train(out, *args):
    return succeeded(run('train.py', f'--out_dir={out}', *args))


def everything(model, name, data, folder):
    """Use a model, under a name, with all scripts. Returns the numbers and the messages."""
    documents = '--mask_documents=False' if model in ('gpn', 'gdn') else '--mask_documents=True'
    on_data, own, standard = [f'--data={data}', documents, *SHORT], folder / 'own', folder / 'standard'
    said = [train(own, f'--model={name}', *on_data, *SIZES.get(model, OTHERS)),
            train(standard, '--model=standard', *on_data, *OTHERS)]
    shutil.rmtree(checkpoints(own)[0])
    said.append(train(own, '--resume'))
    for out, target, source in (('a', name, standard), ('b', 'standard', own)):  # perhaps refused
        said.append(run('train.py', f'--out_dir={folder / out}', f'--model={target}', f'--init_from={source}',
                        *on_data))
    drafts = hasattr(models.model_file(name).Model, 'draft')
    for options in ([], ['--draft_len=1']) if drafts else ([],):
        said.append(run('sample.py', own, 'ab', '--max_new_tokens=6', '--temperature=0', '--dtype=float32', *options))
    said.append(run('eval.py', own, '--val', '--val_tokens=64', '--dtype=float32'))
    said.append(run('-m', 'lm_architectures.hf.export', own, f'--to_hf={folder}/hf'))
    for analysis, *options in ANALYSES.get(model, ()):
        said.append(run('-m', f'papers.{analysis}', own, f'--out={folder}/{analysis}', *options))
    failed = [result.stderr for i, result in enumerate(said) if result.returncode and i not in (3, 4)]
    assert not failed, failed
    evaluated = json.loads((own / 'eval.jsonl').read_text())
    losses = [[record.get(key) for key in ('step', 'loss', 'nll', 'val')] for record in records.read_log(own)]
    tables = [(folder / f'{analysis}.csv').read_text() for analysis, *_ in ANALYSES.get(model, ())]
    tensors = load_checkpoint(own)[1], load_file(folder / 'hf/model.safetensors')
    text = re.sub(r'[\d.,+-]+(e[+-]\d+)?', '0', '\n'.join(result.stdout + result.stderr for result in said))
    text = re.sub(r'\s+', ' ', text)  # columns are as wide as the names in them
    shutil.rmtree(folder)
    return tensors, *(re.sub('fork', model, str(part)) for part in (
        losses, evaluated['results'], evaluated['edited'], tables, text))


IN_SUITE = 'sps', 'gpn'


@pytest.mark.parametrize('model', [
    *IN_SUITE, *(pytest.param(path.stem.removeprefix('model_'), marks=pytest.mark.long)
                 for path in sorted(ROOT.glob('model_*.py')) if path.stem.removeprefix('model_') not in IN_SUITE)])
def test_a_copy_under_another_name_does_the_same(model, repository, tiny_data, tmp_path):
    shutil.copy(ROOT / f'model_{model}.py', repository / 'model_fork.py')
    (tensors, *rest), (its_tensors, *its_rest) = (
        everything(model, name, tiny_data, tmp_path / 'runs') for name in (model, 'fork'))
    assert its_rest == rest
    torch.testing.assert_close(its_tensors, tensors, rtol=0, atol=0)


# ---- models by path ----

MINE = '''
from dataclasses import dataclass
from typing import Literal
from model_standard import Model as Standard, Config as Base
@dataclass
class Config(Base):
    gate_bias: float = -4.0  # a negative number
    widths: tuple[int, ...] = (1, 2)  # a sequence
    rates: tuple[float, ...] | None = None
    kind: Literal['a', 'b'] = 'a'
class Model(Standard):
    pass
'''


@pytest.fixture
def mine(repository, tmp_path):
    path = tmp_path / 'elsewhere/model_mine.py'
    path.parent.mkdir()
    path.write_text(MINE)
    return path


def test_a_model_file_anywhere_is_trained_and_used_by_its_path(mine, tiny_data, tmp_path):
    config, out = tmp_path / 'config.py', tmp_path / 'run'
    config.write_text(f'model = {str(mine)!r}\nwidths = 3, 4\ngate_bias = -2\n')
    train(out, config, f'--data={tiny_data}', *SHORT, *OTHERS, '--rates=-1,2.5', '--kind=b')
    record = json.loads((out / 'config.json').read_text())
    assert record['model'] == record['settings']['model'] == 'mine'
    values = folders.saved_config(folders.read_run(out), out)
    assert (values.gate_bias, values.widths, values.rates, values.kind) == (-2.0, (3, 4), (-1.0, 2.5), 'b')
    shutil.rmtree(checkpoints(out)[0])
    train(out, '--resume', f'--model={mine}', '--widths=3,4', '--gate_bias=-2')
    config.write_text('seed = 1337\n')  # names no model: the run's continues
    assert 'model mine: ' in train(out, '--resume', config).stdout
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume', '--widths=3,5'), 'widths = (3, 4), but (3, 5)')
    models.ADDED.clear()
    sample = 'sample.py', out, 'ab', '--max_new_tokens=5', '--temperature=0'
    assert_sentence(run(*sample), "unknown model 'mine'", '--model=PATH', '--code=run')
    texts = [succeeded(run(*sample, option)).stdout for option in ('--code=run', f'--model={mine}')]
    assert texts[0] == texts[1]


def test_a_wrong_model_gives_a_sentence(mine, tiny_run, tiny_data, tmp_path):
    start = 'train.py', f'--data={tiny_data}', f'--out_dir={tmp_path}/x', '--dry_run'
    shutil.copy(mine, mine.with_name('model_sps.py'))
    for model, sentence in (
            ('=a/x.py', 'there is no such file'), ('', 'model is True on the command line: expected str'),
            ('=config/quickstart.py', 'it has no Config'), (f'={mine.with_name("model_sps.py")}', 'is taken by'),
            (f'={tiny_run}/code/model_standard.py', 'the copy in a run: use --code=run')):
        assert_sentence(run(*start, f'--model{model}'), sentence)
    assert_sentence(run('sample.py', tiny_run, 'ab', f'--model={mine}'), 'is not its file')
    for line, sentence in (("may_change = 'kind'", "Config.may_change of model 'mine' is 'kind': expected a tuple"),
                           ("shared = 'blok_size',", "Config.shared of model 'mine' is ('blok_size',)"),
                           ('gpu_gib: float = 1.0', 'has gpu_gib, which is a setting of train.py'),
                           ('pair: tuple[int, float] = (1, 2)', 'expected the type tuple[X, ...]')):
        mine.write_text(MINE.replace('    kind:', f'    {line}\n    kind:'))
        assert_sentence(run(*start, f'--model={mine}'), sentence)


# ---- the code of a run ----

def test_a_run_keeps_the_code_of_its_model(repository, tiny_data, tmp_path):
    """After an edit, every script says so in one line; with --code=run, nothing has changed."""
    path, out = repository / 'model_mine.py', tmp_path / 'run'
    shutil.copy(ROOT / 'model_standard.py', path)
    train(out, '--model=mine', f'--data={tiny_data}', *SHORT, *OTHERS)
    assert (out / 'code/model_mine.py').read_text() == path.read_text().replace('from attn', 'from .attn').replace(
        'from scans', 'from lm_architectures.scans')

    def use(*options):
        """Return what each script says, and the loss of eval.py."""
        resumed = shutil.copytree(out, tmp_path / f'resumed{len(options)}', dirs_exist_ok=True)
        shutil.rmtree(checkpoints(resumed)[0])
        shutil.rmtree(tmp_path / 'hf', ignore_errors=True)
        said = []
        for command in (('sample.py', out, 'ab', '--max_new_tokens=5', '--temperature=0'),
                        ('eval.py', out, '--val', '--val_tokens=64'),
                        ('-m', 'lm_architectures.hf.export', out, f'--to_hf={tmp_path}/hf'),
                        ('train.py', f'--out_dir={resumed}', '--resume')):
            said.append(succeeded(run(*command, *options)))
        line = json.loads((out / 'eval.jsonl').read_text().splitlines()[-1])
        return said, line, records.read_log(resumed)[-1]['loss'], said[0].stdout
    _, before, loss, text = use()
    assert before['edited'] == []
    path.write_text(path.read_text().replace('F.silu(gate)', 'F.relu(gate)'))  # is imported again
    said, after, its_loss, _ = use()
    for result in said:
        assert result.stderr.count('differs from') == 1, result.stderr
    assert f'{path} differs from {out}/code/model_mine.py, with which' in said[0].stderr
    assert '"resumed_from": 3, "edited_files": 1' in (tmp_path / 'resumed0/log.jsonl').read_text()
    assert after['edited'] == [str(path)] and after['results'] != before['results'] and its_loss != loss
    _, stored, its_loss, its_text = use('--code=run')
    assert (stored['results'], its_loss, its_text) == (before['results'], loss, text) and stored['edited'] == []
    (out / 'code/model_mine.py').write_text('import nowhere')
    assert_sentence(run('sample.py', out, 'ab', '--code=run'), 'cannot be imported', 'nowhere')
    shutil.rmtree(out / 'code')
    assert_sentence(run('sample.py', out, 'ab', '--code=run'), 'has no copy of the code')
    assert_sentence(run('train.py', '--model=mine', '--code=run', f'--out_dir={tmp_path}/x', f'--data={tiny_data}'),
                    'add --resume')
    for name in ('--extend', '--resume --out_dir'):
        assert_sentence(run('train.py', *name.split(), '--code=run'), 'True on the command line')


@pytest.mark.parametrize('name', ['code/model_evil.py', 'evil.py', '../evil.py', '../evil', 'evil', 'os', 'a.b', ''])
def test_a_hostile_run_folder_imports_nothing(name, tiny_run, tmp_path):
    out = shutil.copytree(tiny_run, tmp_path / 'a/run')
    for path in ('code/model_evil.py', 'code/model_os.py', 'evil.py', 'model_evil.py', '../evil.py'):
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_text(HOSTILE)
    for path in (out / 'code').iterdir():
        path.write_text(HOSTILE)
    before = json.loads((out / 'config.json').read_text())
    (out / 'config.json').write_text(json.dumps(before | {'model': name}))
    for command in (['sample.py', out, 'ab'], ['eval.py', out, '--val'], ['train.py', f'--out_dir={out}', '--resume'],
                    ['train.py', f'--init_from={out}', f'--out_dir={tmp_path}/x'], ['-m', 'papers.nextlat.probes', out],
                    ['-m', 'lm_architectures.hf.export', out, f'--to_hf={tmp_path}/hf']):
        result = run(*command)
        assert 'imported' not in result.stdout + result.stderr
        assert_sentence(result, 'model')
    (out / 'config.json').write_text(json.dumps(before))
    succeeded(run('sample.py', out, 'ab', '--max_new_tokens=2'))  # the stored code, which is hostile, is not used
    with pytest.raises(SystemExit, match='imported'):
        models.model_file(before['model'], str(out))


# ---- packages ----

def test_a_bug_of_an_edited_model_keeps_its_traceback():
    with pytest.raises(ValueError, match='invalid literal') as error, models.model_errors('mine'):
        int('bug')
    assert type(error.value) is ValueError


def test_a_model_is_a_package_of_the_files_that_it_imports(mine):
    mine.with_name('scans.py').write_text(HOSTILE)
    mine.with_name('late.py').write_text('power = 1')
    mine.with_name('data.py').write_text('')  # MINE imports `dataclasses`
    mine.write_text('"""\nfrom train import main\n"""\nimport model_standard as standard\nimport scans  # x\n'
                    'from data import __name__ as _\n'
                    + MINE.replace('    pass', '    def late(self):\n        from late import power'))
    module, code = models.model_file(models.add_file(str(mine))), models.code_of('mine')
    assert [*code] == ['attn_kernels', 'model_standard', 'data', 'late', 'model_mine']  # imports first
    text = code['model_mine'][1]
    assert '\nfrom . import model_standard as standard\nfrom lm_architectures import scans  # x\n' in text
    assert '\nfrom train import main\n' in text and '\n        from .late import power' in text
    assert module is models.model_file('mine') and module.Base is module.standard.Config
    assert module.scans.pinned is scans.pinned and module.standard.attention is attn_kernels.attention
    assert pickle.loads(pickle.dumps(module.Config())) == module.Config()


def test_helper_packages_are_part_of_a_run(mine, tmp_path):
    """Their files are flat there: mylib/layers.py is mylib_layers.py."""
    package = mine.with_name('mylib')
    for name, text in (
            ('__init__', 'from .layers import two\nfrom . import deep\nfrom .norm import norm\nthree = 3'),
            ('layers', 'from mylib.deep.er import one\ntwo = one + one'), ('deep/er', 'from ..sizes import one'),
            ('deep/__init__', ''), ('norm', 'norm = 4'), ('sizes', 'one = 1')):
        (package / f'{name}.py').parent.mkdir(exist_ok=True)
        (package / f'{name}.py').write_text(text)
    lines = ('import math; import mylib.layers, mylib.norm', 'import mylib.deep.er as er',
             'from mylib import layers, sizes as s', 'from mylib.layers import (\n    two)',
             'from mylib import norm, three',  # norm is not the file, because __init__.py has the name
             'TOLD = mylib.layers.two, er.one, layers.two, s.one, two, three, norm, mylib.norm, math.pi')
    mine.write_text(MINE + '\n'.join(lines))
    make_run(tmp_path / 'run', models.add_file(str(mine)))
    shutil.rmtree(package)
    assert models.model_file('mine', str(tmp_path / 'run')).TOLD[:-1] == (2, 1, 2, 1, 2, 3, 4, 4)
    assert (tmp_path / 'run/code/mylib_deep_er.py').read_text() == 'from .mylib_sizes import one'
    with pytest.raises(UserError, match='line 13: write the import of bare on a line of its own'):  # no __init__.py
        (package := mine.with_name('bare')).mkdir()
        (package / 'part.py').write_text('')
        mine.write_text(f'{MINE}import bare.part')
        models.model_file('mine')


@pytest.mark.parametrize('line', ['import math, my_layers', 'import scans.gdn as gdn', 'import scans.gdn'])
def test_other_forms_of_imports_and_equal_names_give_a_sentence(mine, line):
    other = mine.with_name('other.py')
    for name in ('my_layers.py', 'model_other.py'):
        mine.with_name(name).write_text('')
    other.write_text(line)
    with pytest.raises(UserError, match=f'{other}, line 1: write the import of (my_layers|scans) on a line of its own'):
        models.model_file(models.add_file(str(other)))
    other.write_text('from model_other import power')
    with pytest.raises(UserError, match='would have the same name in a run'):
        models.model_file('other')


def test_an_edited_file_is_imported_again_and_what_runs_is_shown(mine):
    """By `inspect` and in tracebacks, also after a further edit."""
    helper = mine.with_name('my_layers.py')
    mine.write_text('from my_layers import power\n' + MINE)
    helper.write_text('power = 1')
    first = models.model_file(models.add_file(str(mine)))
    helper.write_text('power = 2')  # as long, perhaps within the same second: a .pyc file would not notice
    again = models.model_file('mine')
    assert (first.power, again.power) == (1, 2)
    helper.write_text('power = 1 / 0')
    with pytest.raises(ZeroDivisionError) as error:
        models.model_file('mine')
    last = error.traceback[-1]
    assert last.path.resolve() == helper and str(last.statement) == 'power = 1 / 0'
    mine.write_text('')
    assert 'class Model(Standard)' in inspect.getsource(again.Model) and Path(again.__file__).samefile(mine)


def test_a_run_has_the_code_that_was_trained_with_what_it_imports(mine, tiny_data, tmp_path, monkeypatch, capsys):
    """Not that of an edit before the first log line. Compiled files are ignored."""
    out, helper, step = tmp_path / 'run', mine.with_name('my_layers.py'), train_script.train_step
    mine.write_text('from my_layers import power\n' + MINE)
    helper.write_text('power = 1')

    def train_step(*args):
        helper.write_text('power = 2')
        return step(*args)
    monkeypatch.setattr(train_script, 'train_step', train_step)
    train(out, f'--model={mine}', f'--data={tiny_data}', *SHORT, *OTHERS)
    assert {path.name: path.read_text() for path in (out / 'code').glob('m*.py')} == {
        'my_layers.py': 'power = 1', 'model_standard.py': models.code_of('standard')['model_standard'][1],
        'model_mine.py': mine.read_text().replace('from m', 'from .m')}
    sampled = run('sample.py', out, 'ab', '--max_new_tokens=2', f'--model={mine}')
    assert f'{helper} differs from {out}/code/my_layers.py' in succeeded(sampled).stderr
    (new := mine.with_name('my_norms.py')).write_text('')
    helper.write_text('import my_norms\npower = 1')
    assert folders.report_edits('mine', None, out) == [str(new), str(helper)]
    assert f'{new} has no copy in {out}/code: this run was started without it\n' in capsys.readouterr().err
    (tmp_path / 'evil.py').write_text(HOSTILE)
    py_compile.compile(str(tmp_path / 'evil.py'), importlib.util.cache_from_source(str(out / 'code/model_mine.py')),
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    succeeded(run('sample.py', out, 'ab', '--code=run', '--max_new_tokens=2'))
    train(out, '--model=standard', '--overwrite', f'--data={tiny_data}', *SHORT, *OTHERS)
    assert {path.name for path in (out / 'code').glob('*.py')} == {'model_standard.py', 'attn_kernels.py'}
