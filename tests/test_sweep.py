"""Comparisons that train their own runs: learning rates bracketed, nothing trained twice, equal FLOPs."""
import csv
import json
import math
import statistics
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis import baseline, forks, shootout, sweep
from common.files import UserError
from common.runs import blank_model, make_config


def write_run(folder, model, tokens, loss, settings=None, **values):
    config = make_config(model, dict(n_layer=2, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256) | values)
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text(json.dumps({
        'model': model,
        'settings': {'model': model, 'block_size': 8, 'max_tokens': tokens, 'learning_rate': 1e-3, 'eval_seed': 42}
        | (settings or {}),
        'model_config': asdict(config), 'versions': {},
        'data': {'tokenizer': 'byte', 'n_ids': 257, 'eos_id': 256, 'bos': False,
                 'sha256': ''}}))
    (folder / 'log.jsonl').write_text(json.dumps({'step': 1, 'tokens': tokens, 'seconds': 1.0, 'val': loss,
                                                  'tokens_per_s': 1234}) + '\n')
    return folder, blank_model(model, config).flops_per_token(8)


@pytest.fixture
def commands(monkeypatch):
    """The commands of `train_all`; a run with --log_interval=9 is killed the first time."""
    seen = []

    def train(command, **kwargs):
        seen.append(command)
        folder = Path(command[-3].removeprefix('--out_dir='))
        write_run(folder, 'standard', 100, 2.0)
        (folder / 'ckpt' / 'step_00000001').mkdir(parents=True, exist_ok=True)
        if '--log_interval=9' in command and '--resume' not in command:
            (folder / 'log.jsonl').write_text('')
        return SimpleNamespace(stderr='killed')
    monkeypatch.setattr(subprocess, 'run', train)
    monkeypatch.setattr(sweep, 'checksum', lambda data: '')
    return seen


def test_runs_are_trained_once_and_interrupted_ones_go_on(tmp_path, commands):
    cells = {tmp_path / 'a': [], tmp_path / 'b': ['--log_interval=9']}
    with pytest.raises(UserError, match='b did not come to its end: killed'):
        sweep.train_all(cells, jobs=1)
    for _ in range(2):
        sweep.train_all(cells, jobs=1)
    assert [(command[-3][-1], command[-1]) for command in commands] == [
        ('a', '--overwrite'), ('b', '--overwrite'), ('b', '--resume')]


@pytest.mark.parametrize('args, sentence', [
    (['--n_layer=3'], 'has n_layer = 2, but 3 is asked for'), (['--max_tokens=200'], 'has max_tokens = 100'),
    (['--model=sps'], "has model = 'standard'"), (['--data=elsewhere'], 'was trained on other data than elsewhere')])
def test_a_run_that_is_done_is_not_taken_for_another(args, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, 'checksum', lambda data: '' if data.startswith('here') else 'another')
    write_run(tmp_path / 'a', 'standard', 100, 2.0, {'data': 'here'})
    for data in ('here', 'here/'):
        sweep.train_all({tmp_path / 'a': [f'--data={data}', '--n_layer=2', '--micro_batch_size=3']}, jobs=1)
    for log in (None, ''):  # one that is done, and one that was begun
        if log is not None:
            (tmp_path / 'a/log.jsonl').write_text(log)
            (tmp_path / 'a/ckpt/step_00000001').mkdir(parents=True)
        with pytest.raises(UserError, match=sentence):
            sweep.train_all({tmp_path / 'a': ['--data=here', *args]}, jobs=1)


def test_compared_runs_have_one_dtype_whatever_their_size(monkeypatch):
    monkeypatch.setattr(sweep, 'pick_device', lambda name: 'cpu')
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: True, raising=False)
    assert (sweep.one_dtype(), sweep.one_dtype(big_enough=True)) == ('float32', 'bfloat16')
    for arguments in (baseline.arguments(baseline.Settings(), baseline.OURS),
                      shootout.arguments(shootout.Settings(), shootout.methods(shootout.Settings())['sps'], {}, 100),
                      forks.arguments(forks.Settings(), [])):
        assert [arg for arg in arguments if arg.startswith('--dtype=')] in (['--dtype=bfloat16'], ['--dtype=float32'])


def test_best_rates_have_a_worse_one_on_both_sides(monkeypatch, tmp_path):
    best = {'a': 1e-3, 'b': 4e-3}
    trained = []
    monkeypatch.setattr(sweep, 'train_all', lambda cells, jobs, may_diverge: trained.extend(cells))
    monkeypatch.setattr(sweep, 'loss_of', lambda folder: abs(math.log(float(folder.name[1:]) / best[folder.name[0]])))
    rates = sweep.best_rates({'a': [], 'b': []}, {'a': 1e-3, 'b': 1e-3}, lambda name, rate: tmp_path / f'{name}{rate}',
                             jobs=1)
    assert rates == pytest.approx({'a': 1e-3, 'b': 1e-3 * 1.5 ** 3})
    assert len(trained) == len(set(trained)) == 3 + 6
    rows = list(csv.DictReader(open(tmp_path / 'rates.csv')))
    assert [row['lr'] for row in rows if row['model'] == 'b'] == ['0.000667', '0.001', '0.0015', '0.00225', '0.00337',
                                                                  '0.00506']
    assert float(rows[1]['loss']) == 0 and rows[1]['model'] == 'a'


def test_a_rate_that_diverges_is_a_worse_one(tmp_path, monkeypatch):
    def train(command, **kwargs):
        given = dict(arg[2:].split('=') for arg in command if '=' in arg)
        rate, folder = float(given['learning_rate']), Path(given['out_dir'])
        write_run(folder, 'standard', 100, 1 / rate, {'learning_rate': rate})
        if rate < 2e-3:
            return SimpleNamespace(stderr='')
        (folder / 'log.jsonl').write_text('')
        return SimpleNamespace(stderr='train.py: the gradients were not finite three steps in a row')
    monkeypatch.setattr(subprocess, 'run', train)
    monkeypatch.setattr(sweep, 'checksum', lambda data: '')

    def folder_of(name, rate):
        return tmp_path / f'{name}_{rate:.3g}'
    for _ in range(2):  # the second time nothing is trained
        assert sweep.best_rates({'a': []}, {'a': 1e-3}, folder_of, jobs=1)['a'] == pytest.approx(1.5e-3)
        monkeypatch.setattr(subprocess, 'run', None)
    assert 'three steps' in (tmp_path / 'a_0.00225' / sweep.DIVERGED).read_text()
    monkeypatch.setattr(subprocess, 'run', train)
    with pytest.raises(UserError, match='a_0.00225 diverged, at the best learning rate of the first seed: tr'):
        sweep.train_all({tmp_path / 'a_0.00225': ['--learning_rate=0.00225']}, jobs=1)
    with pytest.raises(UserError, match='b diverges at learning rates of 0.00667 to 0.015'):
        sweep.best_rates({'b': []}, {'b': 1e-2}, folder_of, jobs=1)


def test_separated_models_are_compared_with_standard_at_equal_flops(tmp_path):
    standard = {1000: (2.0, 2.1, 2.3), 2000: (1.8, 1.85, 1.9)}
    runs, cost = {}, {}
    for tokens, losses in standard.items():
        for i, loss in enumerate(losses):
            run, cost['standard'] = write_run(tmp_path / f'{tokens}_{i}', 'standard', tokens, loss)
            runs.setdefault(f'Standard, {tokens // 1000} x tokens', []).append(run)
    for i, loss in enumerate((1.9, 1.8, 2.0)):
        run, cost['fork'] = write_run(tmp_path / f'fork_{i}', 'sps', 1000, loss, predict_input='state',
                                      predict_layers=1)
        runs.setdefault('fork', []).append(run)
    *_, row = forks.table(runs)
    share = math.log(cost['fork'] / cost['standard']) / math.log(2)
    assert 0 < share < 1
    beside = [a + share * (b - a) for a, b in zip(*standard.values())]
    assert row['standard'] == pytest.approx(statistics.mean(beside))
    assert row['difference'] == pytest.approx(1.9 - statistics.mean(beside))
    assert row['low'] < row['difference'] < row['high']
    assert row['high'] - row['difference'] == pytest.approx(row['difference'] - row['low'])
    assert forks.at_flops([(1, 2.0), (2, 1.0)], 3) is None
    line = [(1, 5.0), (2, 2.0), (4, 1.0)]  # the first line ends where the second begins, the last goes on a little
    assert forks.at_flops(line, 2.05) == pytest.approx(2 - math.log2(2.05 / 2))
    assert forks.at_flops(line, 4.1) == pytest.approx(2 - math.log2(4.1 / 2)) and forks.at_flops(line, 4.3) is None
    assert forks.markdown([row]).splitlines()[-1].startswith('| fork | 1.')
    forks.plot(forks.table(runs), tmp_path / 'forks.png')
    assert (tmp_path / 'forks.png').stat().st_size > 5000


def test_ctrl_c_ends_a_sweep_and_begins_no_further_run(tmp_path, monkeypatch):
    begun = []

    def interrupted(*args, **options):
        begun.append(args)
        time.sleep(0.05)
        raise KeyboardInterrupt
    monkeypatch.setattr(sweep.subprocess, 'run', interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.train_all({tmp_path / str(i): [] for i in range(8)}, 1)
    assert len(begun) < 4
