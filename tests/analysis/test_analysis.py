"""Figures from run folders: averages over seeds, labels, and where curves cross."""
import json
import shutil

import numpy as np
import pytest
from conftest import assert_sentence, run, succeeded

from analysis import figures, loss_curves, scores
from analysis.runs import Run, curve, curves_of, differences, group, named, spread
from lm_architectures.files import UserError, warn_once


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


def written(*args, **kwargs):
    return Run(write_run(*args, **kwargs))


def test_curves_average_seeds_and_labels_show_differing_settings(tmp_path):
    runs = [written(tmp_path / 'a', [4.0, None, 2.0], settings={'extend': None}),
            written(tmp_path / 'b', [4.0, 9.0, 3.0], seed=1, settings={'threads': 4, 'extend': 'out/short_b'}),
            written(tmp_path / 'c', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='sps', window=64),
            written(tmp_path / 'd', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='two_x_memory',
                    window=None)]
    assert group(runs) == {'standard': runs[:2], 'sps, method=sps': [runs[2]], 'sps, method=two_x_memory': [runs[3]]}
    assert differences(runs)[runs[2]] == {'model': 'sps', 'learning_rate': 2.0, 'method': 'sps', 'window': 64}
    flops = runs[0].flops_per_token
    assert flops > 0 and curve(runs[:2])[1] == {
        'step': 2, 'tokens': 200, 'minutes': 2.0, 'gpu_hours': None, 'flops': 200 * flops, 'mean': 2.5, 'lowest': 2.0,
        'highest': 3.0, 'seeds': 2}


def test_labels_hold_only_settings_that_differ(tmp_path, capsys):
    runs = [written(tmp_path / name, [4.0], 'gpn', settings=settings, window=window)
            for name, settings, window in (('a', {'max_tokens': 2_500_000, 'min_lr': 0.1}, 64),
                                           ('b', {'max_tokens': 5_000_000, 'min_lr': 0.1}, 64),
                                           ('c', {'max_tokens': 5_000_000, 'min_lr': 0.2, 'data': 'x/fineweb/'}, 64),
                                           ('d', {'max_tokens': 5_000_000, 'min_lr': 0.1, 'later': True}, None))]
    assert list(group(runs)) == ['window=64, tokens=2.5M, min_lr=0.1', 'window=64, tokens=5M, min_lr=0.1',
                                 'window=64, tokens=5M, min_lr=0.2', 'window=None, tokens=5M, min_lr=0.1']
    assert list(group(runs[:1])) == ['gpn']
    curves_of(runs[2:], curve)
    assert 'window=None: also min_lr=0.1\n' in capsys.readouterr().out
    alike = [written(tmp_path / f'data_{name}', [4.0], settings={'data': f'{name}/text'}) for name in 'ab']
    assert list(group(alike)) == [f'standard, {tmp_path}/data_a', f'standard, {tmp_path}/data_b']


def test_labels_can_be_given(tmp_path):
    """One for each group, in the order of the runs."""
    runs = [written(tmp_path / name, [4.0], model, seed=seed) for name, model, seed in (
        ('a', 'sps', 1), ('b', 'sps', 2), ('c', 'gpn', 1))]
    assert group(runs, labels='first, second') == {'first': runs[:2], 'second': runs[2:]}
    assert [*named(runs[:2], None).values()] == ['a', 'b'] and [*named(runs[:2], 'x,y').values()] == ['x', 'y']
    for wrong in ('first', 'a,b,c', 'a,a'):
        with pytest.raises(UserError, match=f"labels is '{wrong}': expected 2 different names, separated by commas"):
            group(runs, labels=wrong)
    succeeded(run('-m', 'analysis.loss_curves', *runs, '--labels=first,second', f'--out={tmp_path}/figure'))
    assert {row['label'] for row in figures.read_csv(tmp_path / 'figure.csv')} == {'first', 'second'}


def test_forks_and_copies_of_a_run_are_not_averaged_with_it(tmp_path, capsys):
    sps, copy, fork = (written(tmp_path / name, [4.0], model, method='sps')
                       for name, model in (('a', 'sps'), ('b', 'sps'), ('c', 'mysps')))
    assert list(curves_of([sps, copy, fork], curve)) == ['sps', 'mysps']
    assert curve([sps, copy])[-1]['seeds'] == 1 and 'b duplicates' in capsys.readouterr().err


def test_edits_new_settings_and_imported_models_are_not_averaged(tmp_path):
    runs = [written(tmp_path / str(seed), [4.0], seed=seed, **values) for seed, values in enumerate((
        {}, {}, {}, {'window': 64}))]
    for run_, code in zip(runs, ('x = 1', 'x = 1  # a comment', 'x = 2', 'x = 1')):
        (tmp_path / run_.folder / 'code').mkdir()
        (tmp_path / run_.folder / 'code/model_standard.py').write_text(code)
    assert list(group(runs).values()) == [runs[:2], [runs[2]], [runs[3]]]
    assert [label.count('edit=') for label in group(runs[:3])] == [1, 1]
    for imported in runs[:2]:
        del imported.record['settings']['seed']
    assert list(group(runs[:2]).values()) == [runs[:1], runs[1:2]]


def test_runs_on_different_data_are_drawn_with_a_warning(tmp_path, capsys):
    runs = [written(tmp_path / model, [4.0], model) for model in ('standard', 'sps')]
    runs[1].record['data']['sha256'] = 'other'
    warn_once.cache_clear()  # it may have been said before
    assert list(curves_of(runs, curve)) == ['standard', 'sps'] and 'have different data' in capsys.readouterr().err


def test_costs_are_those_of_the_stored_code_if_it_is_asked_for(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / 'run')
    stored = folder / 'code/model_standard.py'
    stored.write_text(stored.read_text().replace('return 6 * n_matrix_weights(self)', 'return 1e9 + 0 * T #'))
    flops = []
    for options in ([], ['--code=run']):
        succeeded(run('-m', 'analysis.loss_curves', folder, f'--out={tmp_path}/figure', *options))
        row = figures.read_csv(tmp_path / 'figure.csv')[-1]
        flops.append(float(row['flops']) / int(row['tokens']))
    assert flops[0] < 1e6 and flops[1] == 1e9


def line(*losses, cost=1):
    """Return the points of one run at 0, 1, ... tokens."""
    return [{'step': i, 'tokens': i, 'minutes': cost * i, 'gpu_hours': None, 'flops': cost * i}
            | spread([loss]) for i, loss in enumerate(losses)]


def test_the_end_of_every_curve_is_visible():
    def points(*losses):
        return [p | {'tokens': 1e6 * p['tokens']} for p in line(*losses)]
    figure = loss_curves.plot({'a': points(9, 2, 1.5, 1), 'b': points(12, 3, 3, 3), 'c': points(2)})
    figure.canvas.draw()
    for axes in figure.axes:
        assert axes.get_ylim()[0] < 1 and 3 < axes.get_ylim()[1] < 3.6
        assert any(label.get_text() for label in axes.get_yticklabels())
    assert '3 M' in [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_runs_that_cannot_be_drawn_are_left_out_and_named(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, 3.0]), write_run(tmp_path / 'b', [], 'sps'), tmp_path / 'none']
    result = succeeded(run('-m', 'analysis.loss_curves', *runs))
    assert 'left out' in result.stderr and 'b: no val that' in result.stderr
    assert 'none is not a run folder' in result.stderr
    assert 'standard 3 3 3 1 100 1' in ' '.join(result.stdout.split())
    assert (tmp_path / 'loss_curves.png').read_bytes()[:4] == b'\x89PNG' and (tmp_path / 'loss_curves.csv').exists()


def test_differences_pair_runs_by_seed(tmp_path):
    losses = {('standard', 1): [4.0, 3.0], ('standard', 2): [5.0, 2.0], ('sps', 2): [5.5, 2.25], ('sps', 1): [4.0, 3.5]}
    runs = [write_run(tmp_path / f'{model}{seed}', own, model, seed=seed) for (model, seed), own in losses.items()]
    alone = write_run(tmp_path / 'alone', [4.0, 3.0], 'nextlat', seed=3)
    result = succeeded(run('-m', 'analysis.loss_curves', *runs, alone, '--minus=standard', f'--out={tmp_path}/figure'))
    rows = {(row['label'], row['step']): row for row in figures.read_csv(tmp_path / 'figure.csv')}
    assert [[float(row[key]) for key in ('mean', 'lowest', 'highest')] for (label, _), row in rows.items()
            if label == 'sps'] == [[0.25, 0, 0.5], [0.375, 0.25, 0.5]]
    assert 'has seed 3: --minus has no run' in result.stderr


def test_crossing_is_where_a_curve_drops_below_and_stays_below():
    first = line(5, 4, 3, 2)
    assert loss_curves.crossing(line(6, 3, 4, 1.9), first, 'tokens') == 3
    assert loss_curves.crossing(line(6, 3, 2, 1), first, 'tokens') == 1
    assert loss_curves.crossing(line(6, 3, 2, 2.5), first, 'tokens') is None
    # nothing is compared beyond the end of the first curve
    assert loss_curves.crossing(line(6, 5, 3.1, 2, 1, 1), first, 'tokens') is None
    assert loss_curves.crossing(line(4), line(5), 'tokens') == 0  # one evaluation each
    assert loss_curves.crossings(line(6, 3, 2, 1, cost=2), first) == [  # each axis separately
        'from 1 training tokens on', 'never over training time, minutes', 'never over training FLOPs']


def test_gpu_hours_are_wall_time_times_gpus(tmp_path):
    runs = [written(tmp_path / device, [4.0, 3.0, 2.0], seed=processes,
                    versions={'device': device, 'processes': processes})
            for device, processes in (('cuda:0', 2), ('cuda', 4), ('cpu', 8))]
    on_gpus, on_cpu = curve(runs[:2]), curve(runs[2:])
    assert on_gpus[2]['gpu_hours'] == pytest.approx((2 + 4) / 2 * 2 / 60)
    assert loss_curves.axes_of([on_gpus]) == ['tokens', 'gpu_hours', 'flops']
    assert loss_curves.axes_of([on_gpus, on_cpu]) == ['tokens', 'minutes', 'flops']
    without_flops = [point | {'flops': None} for point in on_cpu]
    assert loss_curves.axes_of([without_flops]) == ['tokens', 'minutes']


@pytest.mark.parametrize('script', ['loss_curves', 'scores', 'context_ready', 'gpn_state', 'seeds', 'scaling',
                                    'window_sweep', 'tokens_to_match', 'tables', 'speculative'])
def test_figures_reject_unusable_runs_with_a_clear_error(tmp_path, script):
    run_folder = write_run(tmp_path / 'a', [])
    assert_sentence(run('-m', f'analysis.{script}'), 'which run')
    assert_sentence(run('-m', f'analysis.{script}', tmp_path / 'none'), 'is not a run folder')
    assert_sentence(run('-m', f'analysis.{script}', run_folder, f'--out={tmp_path}/figure'), run_folder)
    assert not list(tmp_path.glob('figure*'))


def test_score_curves_and_the_step_from_which_a_task_stays_solved(tmp_path):
    runs = []
    for seed in (0, 1):
        log = [{'step': step, 'tokens': step, 'seconds': 1.0, 'val': 1.0, 'accuracy_0': a,
                'accuracy_1': 0.5 + seed / 4, 'nll': 1.0}
               for step, a in ((10, 0.99), (20, 0.9), (30, 1.0), (40, 1.0))]
        runs.append(written(tmp_path / f'{seed}', [], seed=seed, log=log))
    assert scores.score_names(runs[0], ('accuracy',)) == ['accuracy_0', 'accuracy_1']
    points = curve(runs, 'accuracy_1')
    assert [p['step'] for p in points] == [10, 20, 30, 40] and points[0]['mean'] == .625 and points[0]['highest'] == .75
    said = succeeded(run('-m', 'analysis.scores', *runs, '--scores=accuracy,nll', f'--out={tmp_path}/figure')).stdout
    assert [line.split()[7:] for line in said.splitlines()[1:4]] == [['30'], [], []]  # a loss is not solved
    rows = [{'label': label, 'score': name} | p for label, names in (('a', ('x', 'y')), ('b', ('x',)))
            for name in names for p in points]
    assert [(axes.get_title(), len(axes.lines)) for axes in scores.plot(rows).axes] == [('a', 2), ('b', 1)]


def test_bars_show_final_scores_of_finished_runs_by_dataset(tmp_path, monkeypatch):
    ends = {('star:arms=2', 'ntp'): (0.4, 0.6, None), ('star:arms=2', 'mtp'): (0.75, 1.0),
            ('star:arms=5', 'ntp'): (0.2,), ('star:arms=5', 'mtp'): (0.9,)}
    runs, drawn = [], []
    for (data, objective), of_seeds in ends.items():
        for seed, end in enumerate(of_seeds):
            own = {'objective': 'ntp'} if objective == 'ntp' else {}
            points = ((10, 0.1), (20, end)) if end is not None else ((10, 0.99),)
            log = [{'step': step, 'tokens': step, 'seconds': 1.0, 'val': 1.0, 'accuracy': a} for step, a in points]
            runs.append(write_run(tmp_path / f'{data}_{objective}_{seed}', [], 'nextlat' if own else 'mtp', seed,
                                  {'data': data, 'max_tokens': 20}, log=log, **own))
    monkeypatch.setattr(figures, 'write', lambda path, contents: drawn.append(contents['.png']))
    scores.main([*runs, '--bars'])
    axes, = drawn[0].axes
    assert [(round(bar.get_x() + bar.get_width() / 2, 1), bar.get_height()) for bar in axes.patches] == [
        (-0.2, 0.5), (0.8, 0.2), (0.2, 0.875), (1.2, 0.9)]
    to_seeds = [line.vertices[:, 1].tolist() for bars in axes.collections for line in bars.get_paths()]
    assert np.allclose(to_seeds, [(0.4, 0.6), (0.2, 0.2), (0.75, 1), (0.9, 0.9)])
