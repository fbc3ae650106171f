"""Tables and figures from run folders: labels, averages over seeds, curves and final values."""
import dataclasses
import json
import math
import re
import shutil
import statistics

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, assert_sentence, run, succeeded
from scipy.stats import t as student

from analysis import commands, figures
from analysis.runs import compared, curve, finished, interval, labeled, named, read_logs, read_runs
from lm_architectures import train
from lm_architectures.files import UserError, warn_once
from lm_architectures.settings import read_config_file
from papers.models import measured


def write_run(folder, losses, model='standard', seed=0, settings=None, versions=None, log=None, **values):
    """Write a run with losses at 0, 100, ... tokens, or the records `log`. values: its Config."""
    folder.mkdir(exist_ok=True)
    settings = {'model': model, 'block_size': 8, 'seed': seed, 'learning_rate': 1.0, 'eval_seed': 42} | (settings or {})
    data = {'tokenizer': 'byte', 'n_ids': 257, 'eos_id': 256, 'bos': False, 'sha256': ''}
    (folder / 'config.json').write_text(json.dumps({'model': model, 'settings': settings, 'model_config': values,
                                                    'versions': versions or {}, 'data': data}))
    log = log or [{'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i} | ({} if loss is None else {'val': loss})
                  for i, loss in enumerate(losses)]
    lines = [json.dumps(record) + '\n' for record in log]
    (folder / 'log.jsonl').write_text(''.join(lines) + '{"step": 9, "to')  # the last line is truncated, as after a kill
    return str(folder)


def change(folder, part, **values):
    """Change a part of a run's config.json. None deletes a value."""
    path = f'{folder}/config.json'
    with open(path) as file:
        record = json.load(file)
    record[part] = {key: value for key, value in (record[part] | values).items() if value is not None}
    with open(path, 'w') as file:
        json.dump(record, file)


def table(*folders, labels=None, ignored=()):
    return labeled(read_runs(folders), labels, ignored)


def labels_of(*folders):
    return [*table(*folders).label]


def analyzed(folder, *args):
    """Run `python -m analysis`; return the rows of its CSV and the result of the script."""
    found = succeeded(run('-m', 'analysis.__main__', *args, f'--out={folder}/figure'))
    assert (folder / 'figure.png').read_bytes()[:4] == b'\x89PNG'
    return pd.read_csv(folder / 'figure.csv', keep_default_na=False), found


# ---- runs and labels ----

def test_labels_show_as_few_settings_as_tell_the_runs_apart(tmp_path, capsys):
    runs = [write_run(tmp_path / 'a', [4.0], settings={'extend': None}),
            write_run(tmp_path / 'b', [4.0], seed=1, settings={'threads': 4, 'extend': 'out/short_b'}),
            write_run(tmp_path / 'c', [4.0], 'sps', settings={'learning_rate': 2.0}, method='sps', window=64),
            write_run(tmp_path / 'd', [4.0], 'sps', settings={'learning_rate': 2.0}, method='two_x_memory',
                      window=None)]
    assert labels_of(*runs) == ['standard', 'standard', 'sps, method=sps', 'sps, method=two_x_memory']
    assert 'also different: learning_rate is 1.0, 2.0\n' in capsys.readouterr().out
    runs = [write_run(tmp_path / name, [4.0], 'standard', settings=settings, window=window)
            for name, settings, window in (('a', {'max_tokens': 2_500_000, 'min_lr': 0.1}, 64),
                                           ('b', {'max_tokens': 5_000_000, 'min_lr': 0.1}, 64),
                                           ('c', {'max_tokens': 5_000_000, 'min_lr': 0.2}, 64),
                                           ('d', {'max_tokens': 5_000_000, 'min_lr': 0.1}, None))]
    assert labels_of(*runs) == ['window=64, tokens=2.5M, min_lr=0.1', 'window=64, tokens=5M, min_lr=0.1',
                                'window=64, tokens=5M, min_lr=0.2', 'window=None, tokens=5M, min_lr=0.1']
    assert labels_of(runs[0]) == ['standard']


def test_values_that_look_the_same_when_shortened_are_not_averaged(tmp_path):
    alike = [write_run(tmp_path / name, [4.0], settings={'data': f'{name}/text'}) for name in 'ab']
    assert labels_of(*alike) == [f'data=text, {tmp_path}/a', f'data=text, {tmp_path}/b']


def test_labels_can_be_given(tmp_path):
    """One for each group, in the order of the runs."""
    runs = [write_run(tmp_path / name, [4.0], model, seed=seed) for name, model, seed in (
        ('a', 'sps', 1), ('b', 'sps', 2), ('c', 'standard', 1))]
    assert [*table(*runs, labels='first, second').label] == ['first', 'first', 'second']
    alone = read_runs(runs[:2])
    assert [*named(alone).label] == ['a', 'b'] and [*named(alone, 'x,y').label] == ['x', 'y']
    for wrong in ('first', 'a,b,c', 'a,a'):
        with pytest.raises(UserError, match=f"labels is '{wrong}': expected 2 different names, separated by commas"):
            table(*runs, labels=wrong)
    rows, _ = analyzed(tmp_path, 'curves', *runs, '--labels=first,second')
    assert {*rows.label} == {'first', 'second'}


def test_forks_edits_imported_models_and_copies_are_not_averaged(tmp_path, capsys):
    sps, copy, fork = (write_run(tmp_path / name, [4.0], model, method='sps')
                       for name, model in (('a', 'sps'), ('b', 'sps'), ('c', 'mysps')))
    assert labels_of(sps, copy, fork) == ['sps', 'mysps'] and 'b duplicates' in capsys.readouterr().err
    runs = [write_run(tmp_path / str(seed), [4.0], seed=seed, **values) for seed, values in enumerate((
        {}, {}, {}, {'window': 64}))]
    for folder, code in zip(runs, ('x = 1', 'x = 1', 'x = 2', 'x = 1')):
        (tmp_path / folder / 'code').mkdir()
        (tmp_path / folder / 'code/model_standard.py').write_text(code)
    groups = [[*own.folder] for _, own in table(*runs).groupby('label', sort=False)]
    assert groups == [runs[:2], [runs[2]], [runs[3]]]
    assert [label.count('edit=') for label in labels_of(*runs[:3])] == [1, 1, 1]
    for folder in runs[:2]:
        change(folder, 'settings', seed=None)
    assert labels_of(*runs[:2]) == ['folder=0', 'folder=1'] and len(finished(read_runs(runs[:2]))) == 2


def test_runs_on_different_data_are_shown_with_a_warning(tmp_path, capsys):
    runs = [write_run(tmp_path / model, [4.0], model) for model in ('standard', 'sps')]
    change(runs[1], 'data', sha256='other')
    warn_once.cache_clear()  # it may have been said before
    assert labels_of(*runs) == ['standard', 'sps'] and 'have different data' in capsys.readouterr().err


def test_costs_are_those_of_the_stored_code_if_it_is_asked_for(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / 'run')
    stored = folder / 'code/model_standard.py'
    stored.write_text(stored.read_text().replace('return 6 * n_matrix_weights(self)', 'return 1e9 + 0 * T #'))
    assert read_runs([folder]).flops_per_token[0] < 1e6 and read_runs([folder], 'run').flops_per_token[0] == 1e9


@pytest.mark.parametrize('script', ['analysis.__main__ curves', 'analysis.__main__ final', 'analysis.__main__ match',
                                    'papers.context_ready.unrolls', 'papers.gpn.state', 'papers.nextlat.manhattan',
                                    'papers.nextlat.probes', 'papers.nextlat.speculation', 'papers.sps.gradient_flow',
                                    'papers.sps.restricted_state', 'papers.sps.seeds'])
def test_unusable_runs_give_a_clear_error(tmp_path, script):
    script, folder = script.split(), write_run(tmp_path / 'a', [])
    assert_sentence(run('-m', *script), 'RUN RUN')
    assert_sentence(run('-m', *script, tmp_path / 'none'), 'is not a run folder')
    assert_sentence(run('-m', *script, folder, f'--out={tmp_path}/figure'), folder)
    assert not list(tmp_path.glob('figure*'))


# ---- curves ----

def test_curves_average_the_seeds_at_steps_that_all_of_them_logged(tmp_path):
    runs = table(write_run(tmp_path / 'a', [4.0, None, 2.0]), write_run(tmp_path / 'b', [4.0, 9.0, 3.0], seed=1))
    point = curve(read_logs(runs)).iloc[1].to_dict()
    flops = runs.flops_per_token[0]
    assert flops > 0 and math.isnan(point.pop('gpu_hours')) and point == {
        'label': 'standard', 'step': 2, 'tokens': 200, 'minutes': 2.0, 'flops': 200 * flops, 'mean': 2.5,
        'lowest': 2.0, 'highest': 3.0, 'seeds': 2}


def line(*losses, cost=1, label='a', tokens=1):
    """Return the points of one run at 0, 1, ... steps."""
    steps = np.arange(len(losses))
    return pd.DataFrame({'label': label, 'step': steps, 'tokens': tokens * steps, 'minutes': cost * steps,
                         'mean': losses, 'lowest': losses, 'highest': losses})


def test_crossing_is_where_a_curve_drops_below_and_stays_below():
    first = line(5, 4, 3, 2)
    assert commands.crossing(line(6, 3, 4, 1.9), first, 'tokens') == 3
    assert commands.crossing(line(6, 3, 2, 1), first, 'tokens') == 1
    assert commands.crossing(line(6, 3, 2, 2.5), first, 'tokens') is None
    # nothing is compared beyond the end of the first curve
    assert commands.crossing(line(6, 5, 3.1, 2, 1, 1), first, 'tokens') is None
    assert commands.crossing(line(4), line(5), 'tokens') == 0  # one evaluation each
    assert commands.crossing(line(6, 3, 2, 1, cost=2), first, 'minutes') is None


def test_the_end_of_every_curve_is_visible():
    points = pd.concat([line(9, 2, 1.5, 1, tokens=1e6), line(12, 3, 3, 3, label='b', tokens=1e6), line(2, label='c')])
    figure, (axes,) = figures.new_figure('')
    figures.draw(axes, points, 'tokens')
    commands.set_axes(axes, points, 'tokens')
    figure.canvas.draw()
    assert axes.get_ylim()[0] < 1 and 3 < axes.get_ylim()[1] < 3.6
    assert '3 M' in [label.get_text() for label in axes.get_xticklabels()]


def test_runs_that_cannot_be_drawn_are_left_out_and_named(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, 3.0]), write_run(tmp_path / 'b', [], 'sps'), tmp_path / 'none']
    result = succeeded(run('-m', 'analysis.__main__', 'curves', *runs))
    assert 'b: nothing was logged' in result.stderr and 'none is not a run folder' in result.stderr
    assert 'standard 3 3 3 1 1 100 1' in ' '.join(result.stdout.split())
    assert (tmp_path / 'curves.png').exists() and (tmp_path / 'curves.csv').exists()  # beside the first run


def test_runs_that_an_analysis_cannot_use_are_left_out_and_named(capsys):
    def measure(folder):
        if folder in 'xyz':
            raise UserError(f'{folder} cannot be analyzed')
        return [{'k': 1, 'nats': 2.0}, {'k': 2, 'nats': 3.0}]
    runs = pd.DataFrame({'label': ['A', 'B', 'A'], 'folder': ['a', 'x', 'b']})
    rows = measured(runs, measure)
    assert [*rows.run] == ['a', 'a', 'b', 'b'] and {*rows.label} == {'A'} and [*rows.k] == [1, 2, 1, 2]
    assert 'left out: x cannot be analyzed' in capsys.readouterr().err
    with pytest.raises(UserError, match='y cannot be analyzed'):
        measured(runs.assign(folder=['y', 'x', 'z']), measure)


def test_differences_pair_runs_by_seed(tmp_path):
    losses = {('standard', 1): [4.0, 3.0], ('standard', 2): [5.0, 2.0], ('sps', 2): [5.5, 2.25], ('sps', 1): [4.0, 3.5]}
    runs = [write_run(tmp_path / f'{model}{seed}', own, model, seed=seed) for (model, seed), own in losses.items()]
    alone = write_run(tmp_path / 'alone', [4.0, 3.0], 'nextlat', seed=3)
    rows, result = analyzed(tmp_path, 'curves', *runs, alone, '--minus=standard')
    assert rows[rows.label == 'sps'][['mean', 'lowest', 'highest']].to_numpy().tolist() == [
        [0.25, 0, 0.5], [0.375, 0.25, 0.5]]
    assert 'left out: nextlat: no val' in result.stderr
    assert_sentence(run('-m', 'analysis.__main__', 'curves', *runs, '--minus=gpn'), 'expected one of standard; sps')


def test_gpu_hours_are_wall_time_times_gpus(tmp_path):
    on_gpus = table(*(write_run(tmp_path / str(n), [4.0, 3.0, 2.0], seed=n, versions={'device': 'cuda', 'processes': n})
                      for n in (2, 4)))
    assert curve(read_logs(on_gpus)).gpu_hours[2] == pytest.approx((2 + 4) / 2 * 2 / 60)
    write_run(tmp_path / 'cpu', [4.0, 3.0, 2.0], 'sps', versions={'device': 'cpu', 'processes': 8})
    for folders, axes in (([2, 4], ['tokens', 'GPU-hours', 'FLOPs']), ([2, 'cpu'], ['tokens', 'minutes', 'FLOPs'])):
        figure = commands.curves(read_runs([tmp_path / str(name) for name in folders]), commands.Curves())['.png']
        assert [panel.get_xlabel().split()[-1] for panel in figure.axes] == axes


def test_scores_are_drawn_one_by_one_or_averaged(tmp_path):
    runs = []
    for seed in (0, 1):
        log = [{'step': step, 'tokens': step, 'seconds': 1.0, 'val': 1.0, 'accuracy_0': a,
                'accuracy_1': 0.5 + seed / 4, 'nll': 1.0}
               for step, a in ((10, 0.99), (20, 0.9), (30, 1.0), (40, 1.0))]
        runs.append(write_run(tmp_path / f'{seed}', [], seed=seed, log=log))
    rows, found = analyzed(tmp_path, 'curves', *runs, '--y=accuracy*')
    assert [*rows.label] == ['standard, accuracy_0'] * 4 + ['standard, accuracy_1'] * 4
    assert (rows['mean'][4], rows.highest[4], rows.seeds[4]) == (0.625, 0.75, 2)
    assert [line.split()[-1] for line in found.stdout.splitlines()[1:3]] == ['30', '0.016667']  # solved from step 30
    rows, _ = analyzed(tmp_path, 'curves', *runs, '--y=accuracy_0+accuracy_1')
    assert rows['mean'][0] == pytest.approx((0.99 + 0.625) / 2)
    assert {*analyzed(tmp_path, 'curves', *runs, '--y=nll,val')[0].label} == {'standard, nll', 'standard, val'}
    assert_sentence(run('-m', 'analysis.__main__', 'curves', *runs, '--y=kl'), 'no kl was logged')


# ---- tokens to match ----

SMALL = dict(n_layer=1, n_head=1, n_embd=32)


def family_run(folder, method, losses, **kwargs):
    """Write a run of one of the SPS paper's methods, by default one layer of width 32."""
    own = {'standard': {}, 'two_x_memory': {'method': 'two_x_memory', 'window': None}}.get(method, {'method': method})
    model = 'standard' if method == 'standard' else 'sps'
    settings = {'max_tokens': 100} | kwargs.pop('settings', {})
    return write_run(folder, losses, model, settings=settings, **{**SMALL, **own, **kwargs})


def length_run(folder, method, losses, max_tokens, every=100, **kwargs):
    """Write a run with a warm-up of 100 tokens, evaluations every `every` tokens, and 10% decay."""
    settings = {'block_size': 10, 'batch_size': 10, 'max_tokens': max_tokens, 'decay_fraction': 0.1, **kwargs}
    end = max_tokens * (1 if kwargs.get('schedule') == 'constant' else 0.9)
    log = [{'step': i * every // 100, 'tokens': i * every, 'seconds': 1.0, 'val': loss,
            'lr': 1.0 if 100 <= i * every <= end else 0.5} for i, loss in enumerate(losses)]
    return family_run(folder, method, [], settings=settings, log=log, seed=kwargs.get('seed', 0))


def test_tokens_to_match_use_only_the_constant_rate_phase(tmp_path):
    # Standard: 2,000 tokens, decay from 1,800; then 10,000 tokens, decay from 9,000, start ignored
    short = length_run(tmp_path / 'short', 'standard', [1.0] + [5.0 - 0.1 * i for i in range(1, 19)] + [1.0, 1.0], 2000)
    constant = [1.0] * 10 + [4.0 - 0.05 * i for i in range(10, 46)]
    long = length_run(tmp_path / 'long', 'standard', constant + [0.5] * 5, 10_000, every=200, extend=short)
    sps = length_run(tmp_path / 'sps', 'sps', [1.0] + [4.5 - 0.1 * i for i in range(1, 19)] + [0.1, 0.1], 2000)
    rows, found = analyzed(tmp_path, 'match', short, sps, long)
    # SPS is at 2.7 after 1,800 tokens. Standard: 3.2, then 4 - tokens / 4000: 2.7 at 5,200
    assert [*rows[['loss_of', 'by', 'tokens', 'budget']].iloc[0]] == ['sps', 'standard', 5200, 1800]
    assert rows.tokens_ratio[0] == pytest.approx(5200 / 1800, abs=1e-12)
    # conversely: SPS first reaches 3.2 or less at 1,300
    assert [*rows[['loss_of', 'by', 'tokens']].iloc[1]] == ['standard', 'sps', 1300]
    assert '5200 2.8889' in ' '.join(found.stdout.split())
    assert analyzed(tmp_path, 'match', sps, short, long)[0].by[0] == 'sps'  # the first is the baseline
    stopped = length_run(tmp_path / 'stopped', 'standard', constant[:31], 10_000, every=200, extend=short)
    assert analyzed(tmp_path, 'match', short, sps, stopped)[0].tokens[0] == 5200
    # without the long run, Standard never reaches it, whatever an unfinished second seed says
    half = length_run(tmp_path / 'half', 'standard', [1.0] * 10, 2000, seed=2)
    first = analyzed(tmp_path, 'match', short, sps, half)[0].iloc[0]
    assert (first.tokens, first.searched, first.tokens_ratio) == ('', 1800, '')


def test_constant_runs_count_to_the_end_and_cosine_gives_a_clear_error(tmp_path):
    constant = length_run(tmp_path / 'constant', 'standard', [3.0, 2.0, 1.0], 200, schedule='constant')
    assert [*commands.constant_rate(table(constant))['mean']] == [2.0, 1.0]
    half = length_run(tmp_path / 'half', 'standard', [3.0, 2.0], 200)
    assert_sentence(run('-m', 'analysis.__main__', 'match', half), 'was last evaluated at 100 of 200 tokens')
    cosine = length_run(tmp_path / 'cosine', 'delayed_state', [3.0, 2.0], 200, schedule='cosine')
    sps = length_run(tmp_path / 'sps', 'sps', [3.0, 2.5, 2.0], 200, schedule='constant')
    rows, found = analyzed(tmp_path, 'match', cosine, constant, sps)
    assert 'left out: ' in found.stderr and 'without a constant learning rate' in found.stderr
    assert [*rows['loss_of']] == ['sps', 'standard']
    assert_sentence(run('-m', 'analysis.__main__', 'match', cosine), 'without a constant learning rate')


def test_labels_and_baseline_are_the_same_at_all_sizes(tmp_path):
    runs = [family_run(tmp_path / f'{method}_{width}', method, [9.0, 3.0], n_embd=width, settings={
        'learning_rate': 0.1 / width}) for method, width in (
            ('standard', 32), ('sps', 32), ('two_x_memory', 32), ('sps', 64), ('standard', 64))]
    for folder, code in zip(runs, 'aaabb'):  # edited between the sizes
        (tmp_path / folder / 'code').mkdir()
        (tmp_path / folder / 'code/model_x.py').write_text(f'{code} = 1')
    found = table(*runs, ignored=commands.of_size(read_runs(runs)))
    assert [*found.label] == ['standard', 'sps, method=sps', 'sps, method=two_x_memory', 'sps, method=sps', 'standard']
    assert commands.sizes(found.parameters).nunique() == 2


# ---- final values ----

def test_intervals_equal_textbook_formulas():
    values = pd.Series([3.06, 3.07, 3.068])
    half, mean = student.ppf(0.975, 2) * statistics.stdev(values) / math.sqrt(3), sum(values) / 3
    assert interval(values).to_dict() == pytest.approx({'mean': mean, 'low': mean - half, 'high': mean + half, 'n': 3})
    assert math.isnan(interval(pd.Series([2.0, 2.0])).low)


def test_final_losses_are_compared_seed_by_seed(tmp_path):
    losses = {'standard': (2.0, 2.1, 2.3), 'sps': (2.2, 2.4, 2.45)}
    runs = [write_run(tmp_path / f'{model}{seed}', [9.0, loss], model, seed, {'max_tokens': 100})
            for model, own in losses.items() for seed, loss in enumerate(own)]
    unfinished = write_run(tmp_path / 'half', [9.0], 'sps', 3, {'max_tokens': 100})
    rows, found = analyzed(tmp_path, 'final', *runs, unfinished)
    gap = interval(pd.Series([0.2, 0.3, 0.15])).add_prefix('minus_')
    assert rows.iloc[1][[*gap.index]].astype(float).to_dict() == pytest.approx(gap.to_dict())
    assert compared(table(*runs)).loc['sps', 'mean'] == pytest.approx(2.35) and rows['values'][0] == '2.0 2.1 2.3'
    assert '| +0.217 (+0.027 to +0.406) |' in found.stdout == (tmp_path / 'figure.md').read_text() + found.stdout[
        found.stdout.index('written'):]
    assert 'left out' in found.stderr and 'half was last evaluated at 0 of 100 tokens' in found.stderr
    rows, _ = analyzed(tmp_path, 'final', *runs, '--minus=sps')  # the other way round
    assert [*rows.label] == ['sps', 'standard'] and rows.minus_mean[1] == pytest.approx(-gap.minus_mean)
    assert_sentence(run('-m', 'analysis.__main__', 'curves', *runs, '--x=learning_rate'), "unknown setting 'x'")
    assert_sentence(run('-m', 'analysis.__main__', '--out=x'), 'expected python -m analysis curves|final|match')


def test_final_values_over_a_setting_have_one_line_per_label(tmp_path):
    values = {('sps', 0): (3.2, 3.2, 3.5), ('sps', None): (3.15, 3.05), ('sps', 64): (3.0, 3.1),
              ('reverse_sps', 64): (3.3,), ('reverse_sps', 0): (4.0,)}
    runs = [family_run(tmp_path / f'{method}_{window}_{seed}', method, [9.0, loss], window=window, seed=seed)
            for (method, window), losses in values.items() for seed, loss in enumerate(losses)]
    runs.append(family_run(tmp_path / 'standard', 'standard', [9.0, 3.25]))
    rows, found = analyzed(tmp_path, 'final', *runs, '--x=window')
    sps, reverse = 'sps, method=sps', 'sps, method=reverse_sps'
    assert [(row.label, row.window, round(row.mean, 9), row.seeds) for row in rows.itertuples()] == [
        (sps, '0', 3.3, 3), (sps, '64', 3.05, 2), (sps, 'all', 3.1, 2), (reverse, '0', 4.0, 1), (reverse, '64', 3.3, 1),
        ('standard', 'all', 3.25, 1)]
    assert 'sps, method=sps 64 3.05' in ' '.join(found.stdout.split())
    rows, _ = analyzed(tmp_path, 'final', *runs[:3], *runs[-3:], '--x=method')  # a setting that is not a number
    assert [*rows.method] == ['sps', 'reverse_sps', 'reverse_sps', 'none']
    assert_sentence(run('-m', 'analysis.__main__', 'final', *runs, '--x=widow'), "x is 'widow': expected a setting")


TASKS = dict.fromkeys(('arc_easy', 'hellaswag', 'piqa', 'sciq'), 'acc_norm') | {'lambada_openai': 'acc'}
MEAN_ACCURACY = '+'.join(f'{task} {metric}' for task, metric in TASKS.items())


def write_results(folder, results, **settings):
    with open(f'{folder}/eval.jsonl', 'a') as file:
        file.write(json.dumps({'settings': settings, 'results': results}) + '\n')


def test_scaling_is_the_mean_difference_at_each_size(tmp_path):
    runs = []
    for width, losses in ((32, (3.0, 2.9)), (64, (2.5, 2.45))):
        for method, loss, scores in zip(('standard', 'sps'), losses, ((.5, .4, .3, .2, .1), (.52, .4, .36, .2, .2))):
            runs.append(family_run(tmp_path / f'{method}_{width}', method, [9.0, loss], n_embd=width))
            for (task, metric), score in zip(TASKS.items(), scores):  # one evaluation per task
                write_results(runs[-1], {task: {metric: score * width / 64, 'other': 0.9}})
    runs.append(family_run(tmp_path / 'lonely', 'sps', [9.0, 2.0], n_embd=128))
    rows, _ = analyzed(tmp_path, 'final', *runs, '--x=parameters', '--minus=standard')
    assert [*rows.label] == ['standard'] * 2 + ['sps'] * 2 and [*rows['mean'][2:]] == pytest.approx([-0.1, -0.05])
    rows, _ = analyzed(tmp_path, 'final', *runs[:4], '--x=parameters', '--minus=standard', f'--y={MEAN_ACCURACY}')
    assert [*rows['mean'][2:]] == pytest.approx([0.09 / 5, 0.18 / 5])
    said = succeeded(run('-m', 'analysis.__main__', 'final', *runs, f'--y={MEAN_ACCURACY}')).stderr
    assert 'left out: ' in said and 'lonely has no ' in said
    assert_sentence(run('-m', 'analysis.__main__', 'final', runs[-1], f'--y={MEAN_ACCURACY}'), 'lonely has no ')


# ---- a paper's own numbers ----

@pytest.mark.parametrize('paper, config, name', [
    ('sps', 'standard_xl', 'Standard XL'), ('sps', 'sps/two_x_memory_m', '2x Memory M'),
    ('gpn', 'gpn/gpn_130m', 'GPN+M, 1 layer'), ('gpn', 'gpn/gpn_2l', 'GPN+M, 2 layers'),
    ('gpn', 'gpn/gpn_nomem', 'GPN, no memory'), ('gpn', 'gpn/gpn_transformer', 'Transformer++'),
    ('gpn', 'gpn/gdn_130m', 'Gated DeltaNet'), ('nextlat', 'nextlat/fineweb_ntp', 'GPT'),
    ('nextlat', 'nextlat/fineweb_jtp_d4', 'JTP (d = 4)'), ('nextlat', 'nextlat/fineweb_nextlat_d2', 'NextLat (d = 2)')])
def test_configs_match_the_papers_rows(tmp_path, paper, config, name):
    values = read_config_file(f'{ROOT}/config/{config}.py')
    names = {field.name for field in dataclasses.fields(train.Settings)}
    settings = dataclasses.asdict(train.Settings()) | {key: values[key] for key in names & values.keys()}
    of_model = {key: values[key] for key in values.keys() - names} | {'n_ids': settings['assumed_ids'], 'eos_id': None}
    own = table(write_run(tmp_path / 'run', [3.0], settings['model'], settings=settings, **of_model))
    ours, theirs = commands.beside_paper(own, paper).to_dict('records')
    assert theirs['run'] == f'paper: {name}'
    if theirs.get('memory cells'):
        for column in ('state dim', 'memory cells'):
            number, unit = re.fullmatch(r'([\d.]+)([KM]?)', theirs[column]).groups()
            scale = {'': 1, 'K': 1e3, 'M': 1e6}[unit]
            assert abs(float(ours[column]) - float(number) * scale) <= scale * (0.01 if '.' in number else 1)


def paper_run(folder, **values):
    """Write a run with the SPS paper's recipe at scale S."""
    settings = {'max_tokens': 20_000_000_000, 'batch_size': 96, 'block_size': 4096, **values.pop('settings', {})}
    record = {'step': 50863, 'tokens': 20_000_145_408, 'seconds': 7200.0, 'val': 2.75, 'memory_gib': 70.5}
    return family_run(folder, 'sps', [], settings=settings, log=[record],
                      **dict(n_layer=12, n_head=12, n_embd=768) | values)


def test_a_paper_run_is_followed_by_the_papers_row(tmp_path):
    longer = {'settings': {'max_tokens': 20_000_100_000}}
    for i, values in enumerate((longer, {'predict_input': 'token'}, {'window': 0})):
        assert len(commands.beside_paper(table(paper_run(tmp_path / str(i), **values)), 'sps')) == 1
    whole = paper_run(tmp_path / 'sps')
    write_results(whole, {'wikitext': {'nats_per_word': 3.25}, 'c4': {'nats_per_word': 4.25}}, data_dir='files')
    write_results(whole, {name: {'nats_per_word': 4.5} for name in ('books3', 'govreport')})
    write_results(whole, {'sciq': {'acc_norm': 0.5}, 'piqa': {'acc_norm': 0.25}}, limit=7)
    write_results(whole, {'piqa': {'acc_norm': 0.625}})
    _, found = analyzed(tmp_path, 'final', whole, '--paper=sps')
    ours, paper = pd.read_csv(tmp_path / 'figure_paper.csv', dtype=str, keep_default_na=False).to_dict('records')
    assert paper['run'] == 'paper: SPS S' and paper['corpus NLL'] == '3.913' and ours['validation loss'] == '2.750'
    assert ours['corpus NLL'] == f'{(3.25 + 4.25 + 4.5 + 4.5) / 4:.3f}'
    assert ours['task accuracy, %'] == '' and ours['piqa acc_norm, %'] == '62.5' and ours['sciq acc_norm, %'] == ''
    assert '| 2.810 | 3.913 | 51.8 |' in found.stdout
