"""Comparisons that train runs: learning-rate search, reuse of runs, and the results table."""
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import ROOT, assert_sentence, run, succeeded
from test_analysis import write_run

from analysis import commands, compare
from analysis.compare import Method
from analysis.runs import read_runs
from lm_architectures.files import UserError
from lm_architectures.run.dry_run import meta_model
from model_gpn import Config

BUDGET = ['--max_tokens=800', '--warmup_tokens=80', '--dtype=float32']
SMALL = '--n_layer=1 --n_head=2 --n_embd=16'
SPEED = {'standard': 1234, 'gpn': 617}  # training tokens/s


def finished_run(folder, model='standard', tokens=100, loss=2.0, settings=None, seed=0, **values):
    """Write a finished run of a small model with one evaluation at its end."""
    own = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256) | values
    settings = {'max_tokens': tokens, 'learning_rate': 1e-3} | (settings or {})
    record = {'step': 1, 'tokens': tokens, 'seconds': 1.0, 'val': loss, 'tokens_per_s': SPEED[model]}
    write_run(folder, [], model, seed, settings, log=[record], **own)
    return folder


def given(command):
    """Return {setting: value} of a train.py command line."""
    return dict(arg[2:].split('=') for arg in command if '=' in arg)


@pytest.fixture
def trained(monkeypatch):
    """Replace training by a loss that is lowest at a learning rate of 1e-3; return the commands."""
    commands, run_command = [], subprocess.run

    def train(command, **kwargs):
        if str(ROOT / 'train.py') not in command:  # git, which reads the commit
            return run_command(command, **kwargs)
        commands.append(command)
        own = given(command)
        folder, rate, seed = Path(own['out_dir']), float(own.get('learning_rate', 1e-3)), int(own.get('seed', 1))
        values = {key: int(own[key]) for key in ('n_layer', 'n_head', 'n_embd', 'd_k', 'd_v') if key in own}
        model, step = own.get('model', 'standard'), int(own.get('batch_size', 1)) * int(own.get('block_size', 1))
        tokens = math.ceil(int(own.get('max_tokens', 100)) / step) * step
        settings = {key: own[key] for key in ('data', 'dtype') if key in own} | {'learning_rate': rate}
        settings['max_tokens'] = int(own.get('max_tokens', tokens))
        settings |= {key: int(own[key]) for key in ('batch_size', 'micro_batch_size', 'block_size') if key in own}
        settings['warmup_tokens'] = int(own.get('warmup_tokens', 50_000_000))
        loss = 2 + abs(math.log(rate / 1e-3)) + seed / 10
        finished_run(folder, model, tokens, loss, settings, seed, **values)
        (folder / 'ckpt' / 'step_00000001').mkdir(parents=True, exist_ok=True)
        if rate > 1e-2 or ('log_interval' in own and '--resume' not in command):  # diverges, or is killed once
            (folder / 'log.jsonl').write_text('')
        if rate > 0.1:  # diverges before a step is logged
            shutil.rmtree(folder)
        return SimpleNamespace(stderr='the gradients were not finite' if rate > 1e-2 else 'killed')
    monkeypatch.setattr(subprocess, 'run', train)
    monkeypatch.setattr(compare, 'open_data', lambda data: SimpleNamespace(
        sha256='x' * (data == 'elsewhere'), n_ids=257, eos_id=256))
    monkeypatch.setattr(compare, 'pick_device', lambda name: 'cpu')
    return commands


def test_runs_are_trained_once_and_interrupted_ones_are_resumed(tmp_path, trained):
    cells = {tmp_path / 'a': [], tmp_path / 'b': ['--log_interval=9']}
    with pytest.raises(UserError, match='b did not finish: killed'):
        compare.train_all(cells, jobs=1)
    for _ in range(2):
        compare.train_all(cells, jobs=1)
    assert [(given(command)['out_dir'][-1], command[-1]) for command in trained] == [
        ('a', '--overwrite'), ('b', '--overwrite'), ('b', '--resume')]


@pytest.mark.parametrize('args, sentence', [
    (['--n_layer=3'], 'has n_layer = 2, but 3 was given'), (['--max_tokens=200'], 'has max_tokens = 100'),
    (['--model=sps'], "has model = 'standard'"), (['--data=elsewhere'], 'was trained on data other than elsewhere')])
def test_a_finished_run_with_other_settings_is_rejected(args, sentence, tmp_path, trained):
    finished_run(tmp_path / 'a', settings={'data': 'here'})
    compare.train_all({tmp_path / 'a': ['--data=here', '--n_layer=2', '--micro_batch_size=3']}, jobs=1)
    with pytest.raises(UserError, match=sentence):
        compare.train_all({tmp_path / 'a': ['--data=here', *args]}, jobs=1)
    assert not trained


def method(path, rate):
    return Method([*BUDGET, f'--learning_rate={rate}'], str(path), 1 / 8)


def test_best_learning_rates_are_bracketed_by_worse_ones(tmp_path, trained):
    for _ in range(2):  # nothing is trained the second time
        methods = {name: method(tmp_path / name, rate) for name, rate in (('a', 1e-3), ('b', 1e-3 / 1.5 ** 3))}
        rates = compare.set_best_rates(methods, 1)
        assert [method.rate for method in methods.values()] == pytest.approx([1e-3, 1e-3])
    assert len(trained) == 3 + 6
    for own in map(given, trained):  # seed 0, which is not compared; an eighth of the tokens
        assert (own['seed'], own['max_tokens'], own['warmup_tokens']) == ('0', '100', '10')
    _, args = methods['a'].run(1)
    assert args == [*BUDGET, '--learning_rate=0.001', '--learning_rate=0.001', '--seed=1']
    assert [*rates[rates.model == 'b'].lr] == pytest.approx(
        [1e-3 * 1.5 ** i for i in range(-4, 2)], rel=1e-2)


def test_a_diverging_learning_rate_counts_as_worse(tmp_path, trained):
    a, b = method(tmp_path / 'a', 8e-3), method(tmp_path / 'b', 0.1)
    compare.set_best_rates({'a': a}, 1)
    assert a.rate == pytest.approx(1e-3, rel=0.25)
    a.rate = 0.012
    with pytest.raises(UserError, match='a_lr0.012_seed1 diverged, at the best learning rate of seed 0: the gradients'):
        compare.train_seeds({'a': a}, compare.Settings(seeds=1, jobs=1))
    n_before = len(trained)
    for _ in range(2):
        with pytest.raises(UserError, match='b diverges at learning rates of 0.0667 to 0.15'):
            compare.set_best_rates({'b': b}, 1)
    rates = [given(command)['learning_rate'] for command in trained[n_before:]]
    assert rates == ['0.0667', '0.1', '0.15', '0.15'], 'without a config.json, it may have had other settings'


def test_the_search_of_learning_rates_is_bounded(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(compare, 'MOST_RATES', 5)
    with pytest.raises(UserError, match='a: of 5 learning rates, 5.14e-06 to 2.6e-05, the best is 2.6e-05, at the'):
        compare.set_best_rates({'a': method(tmp_path / 'a', 1e-3 / 1.5 ** 12)}, 1)


def test_a_sweep_compares_the_values_of_a_setting(tmp_path, trained):
    command = ['analysis.compare', f'a: --model=standard {SMALL}', f'--out_dir={tmp_path}', '--jobs=1', '--data=here',
               '--max_tokens=100', '--seeds=2', '--sweep=learning_rate=1e-2,0.0003162,1e-3,0.02']
    for _ in range(2):  # nothing is trained the second time
        result = succeeded(run('-m', *command))
    assert len(trained) == 8 and {given(own)['max_tokens'] for own in trained} == {'100'}
    rows = pd.read_csv(tmp_path / 'learning_rate.csv')
    assert [*rows.learning_rate] == [0.0003162, 0.001, 0.01, 0.02] and [*rows.lowest[[1, 3]]] == [2.1, math.inf]
    assert 'a: the lowest mean, 2.1500, is at learning_rate = 0.001\n' in result.stdout
    assert 'edge of the grid' not in result.stderr
    for values in ('1e-3,5e-4', '2e-3,1e-3'):
        result = succeeded(run('-m', *command[:-1], f'--sweep=learning_rate={values}'))
        assert 'learning_rate = 0.001 is at the edge of the grid' in result.stderr
    assert_sentence(run('-m', *command, '--sweep=learning_rate=1e-3,x'), "learning_rate is 'x'")


def test_values_of_a_sweep_have_a_logarithmic_axis_with_the_best_and_diverged_ones_marked():
    losses = {0: (3.0, 3.1), 16: (2.9, 2.7), 128: (2.6, math.inf), None: (2.9, 2.8)}
    runs = pd.DataFrame([{'label': 'a', 'window': window, 'seed': seed, 'y': loss}
                         for window, own in losses.items() for seed, loss in enumerate(own)])
    axes, = commands.over(runs, commands.Final(x='window'))['.png'].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ['0', '16', '128', 'all']
    near, middle, far, none = axes.transData.transform([(x, 0) for x in axes.get_xticks()])[:, 0]
    assert (far - middle) / (none - far) == pytest.approx(3), 'a factor of 8, and of 2'
    _, seeds, best, diverged = axes.lines
    assert [*seeds.get_ydata()] == [*sum(losses.values(), ())]
    assert [*best.get_xdata()] == [16] and [*diverged.get_xdata()] == [128]


@pytest.mark.parametrize('arguments, sentence', [
    ([], 'which models?'), (['--sweep=seed=1,2', 'a: config/gpn_small.py'], 'a setting other than seed'),
    (['config/gpn_small.py', 'b: config/gdn_small.py'], "'config/gpn_small.py' has no name"),
    (['a: config/gpn_small.py', 'b: config/gdn_small.py --dtype=bfloat16'], 'a has dtype = float32, b has bfloat16')])
def test_models_that_cannot_be_compared_give_a_clear_error(arguments, sentence, tmp_path, trained):
    assert_sentence(run('-m', 'analysis.compare', *arguments, f'--out_dir={tmp_path}/out'), sentence)
    assert not (tmp_path / 'out').exists()


def test_models_are_trained_at_their_best_rates_with_every_seed_and_compared(tmp_path, trained):
    sides = f'a: --model=standard {SMALL}', f'b: --model=gpn {SMALL} --d_k=8 --d_v=8 --learning_rate=2e-3'
    command = 'analysis.compare', *sides, f'--out_dir={tmp_path}', '--jobs=1', '--data=here', '--max_tokens=100'
    said = succeeded(run('-m', *command, '--rates_only')).stdout
    assert 'Then 0 runs of seeds. At most 32 in all' in said
    assert {given(own)['seed'] for own in trained} == {'0'} and (tmp_path / 'rates.csv').exists()
    for _ in range(2):  # nothing is trained the second time
        result = succeeded(run('-m', *command))
    assert '3 to 16 runs of each model' in result.stdout and 'At most 42 in all' in result.stdout
    runs = [(own['model'], own['learning_rate'], own['seed']) for own in map(given, trained)]
    assert len(runs) == len(set(runs))
    for model in ('standard', 'gpn'):
        rate, = {rate for name, rate, seed in runs if name == model and seed == '5'}
        assert float(rate) == pytest.approx(1e-3, rel=0.25)
        assert {seed for name, own, seed in runs if (name, own) == (model, rate)} == {*'012345'}
    assert '| minus a (95%) |' in result.stdout and '| 1,234 |' in result.stdout
    assert 'commit' in (tmp_path / 'compare.md').read_text() and (tmp_path / 'compare.png').exists()
    assert [*pd.read_csv(tmp_path / 'compare.csv').label] == ['a', 'b']


def test_one_model_gets_its_learning_rate_and_a_table_without_differences(tmp_path, trained):
    side = f'a: --model=standard {SMALL}'
    result = succeeded(run('-m', 'analysis.compare', side, f'--out_dir={tmp_path}', '--jobs=3', '--data=here',
                           '--max_tokens=100', '--seeds=2'))
    assert '\n| a | ' in result.stdout and 'minus' not in result.stdout
    assert ', 3 threads; ' in (tmp_path / 'compare.md').read_text()  # of the runs


@pytest.mark.parametrize('equal', ['flops', 'time'])
def test_tokens_follow_from_the_first_models_flops_or_time(equal, tmp_path, trained):
    steps = '--block_size=8 --batch_size=4 --micro_batch_size=4 --learning_rate=1e-3'
    sides = f'a: --model=standard {SMALL} {steps}', f'b: --model=gpn {SMALL} --d_k=8 --d_v=8 {steps}'
    succeeded(run('-m', 'analysis.compare', *sides, f'--out_dir={tmp_path}', '--jobs=1', '--data=here', '--seeds=2',
                  '--max_tokens=9590', f'--equal={equal}'))
    a, b = pd.read_csv(tmp_path / 'compare.csv').to_dict('records')
    assert a['tokens'] == 9600 and b['tokens'] % 32 == 0, 'whole steps, as trained'
    one = b['flops'] / b['tokens'] if equal == 'flops' else 1 / SPEED['gpn']
    budget = a['flops'] if equal == 'flops' else 9600 / SPEED['standard']
    assert b['tokens'] * one == pytest.approx(budget, abs=16 * one)


def test_table_values_follow_from_the_runs(tmp_path):
    folder = finished_run(tmp_path / 'c', 'gpn', 1000, 1.5, d_emb=8, d_k=4, d_v=6, n_layer=1, scan='loop')
    runs = read_runs([folder])
    row = commands.table(runs.assign(label='c', y=runs.loss)).iloc[0]
    model = meta_model('gpn', Config(n_layer=1, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256, d_emb=8,
                                     d_k=4, d_v=6))
    assert row.state_bytes == model.new_cache(1, 8).nbytes and row.flops == 1000 * model.flops_per_token(8)
    assert row.parameters == sum(p.numel() for p in model.parameters()) and row['mean'] == 1.5
