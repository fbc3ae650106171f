"""Figures from run folders: what is averaged, and where lines cross."""
import json

import pytest
from conftest import assert_sentence, run

from analysis import loss_curves, scores
from common.files import UserError


def write_run(folder, losses, model='standard', seed=0, settings=None, **values):
    folder.mkdir()
    settings = {'model': model, 'block_size': 8, 'seed': seed, 'learning_rate': 1.0} | (settings or {})
    (folder / 'config.json').write_text(json.dumps({'model': model, 'settings': settings, 'model_config': values,
                                                    'versions': {},
                                                    'data': {'tokenizer': 'byte', 'n_ids': 257, 'eos_id': 256,
                                                             'sha256': ''}}))
    lines = [json.dumps({'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i} | ({} if loss is None else {'val': loss}))
             for i, loss in enumerate(losses)]
    (folder / 'log.jsonl').write_text('\n'.join(lines) + '\n{"step": 9, "to')  # the last line was cut by a kill
    return str(folder)


def test_seeds_are_averaged_and_settings_that_differ_make_the_label(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, None, 2.0]),
            write_run(tmp_path / 'b', [4.0, 9.0, 3.0], seed=1, settings={'threads': 4}),
            write_run(tmp_path / 'c', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='sps', window=64),
            write_run(tmp_path / 'd', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='two_x_memory',
                      window=None)]
    groups = loss_curves.group(runs)
    assert groups == {'standard, learning_rate=1.0': runs[:2], 'sps, learning_rate=2.0': [runs[2]],
                      'two_x_memory, learning_rate=2.0': [runs[3]]}
    assert loss_curves.curve(runs[:2])[1] == {'step': 2, 'tokens': 200, 'minutes': 2.0, 'mean': 2.5, 'lowest': 2.0,
                                              'highest': 3.0, 'seeds': 2}


def test_crossing_is_where_a_line_goes_below_for_good():
    line = lambda *losses: [{'tokens': i, 'mean': loss} for i, loss in enumerate(losses)]
    first = line(5, 4, 3, 2)
    assert loss_curves.crossing(line(6, 3, 4, 1.9), first, 'tokens') == 3
    assert loss_curves.crossing(line(6, 3, 2, 1), first, 'tokens') == 1
    assert loss_curves.crossing(line(6, 3, 2, 2.5), first, 'tokens') is None
    # beyond the first line's end nothing is compared
    assert loss_curves.crossing(line(6, 5, 3.1, 2, 1, 1), first, 'tokens') is None


def test_runs_without_a_common_step_are_a_sentence(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, None]), write_run(tmp_path / 'b', [None, 3.0], seed=1)]
    with pytest.raises(UserError, match='no validation loss that all of these runs logged'):
        loss_curves.curve(runs)


def test_lines_of_a_log_that_lack_a_number_are_left_out(tmp_path):
    run = write_run(tmp_path / 'a', [4.0, 3.0])
    bad = [{'step': 5}, *({'step': 5, 'tokens': 500, 'seconds': 1.0, 'val': 2.0} | change for change in (
        {'val': float('nan')}, {'val': None}, {'val': {}}, {'tokens': 'x'}, {'seconds': []}))]
    (tmp_path / 'a/log.jsonl').write_text('\n'.join(map(json.dumps, [*bad, bad[1] | {'step': 1, 'val': 1.5}])))
    assert [point['mean'] for point in loss_curves.curve([run])] == [1.5]
    (tmp_path / 'a/log.jsonl').write_text('')
    with pytest.raises(UserError, match='no validation loss'):
        loss_curves.curve([run])


@pytest.mark.parametrize('script', ['loss_curves', 'scores', 'context_ready', 'gpn_state'])
def test_a_run_that_a_figure_cannot_use_is_a_sentence(tmp_path, script):
    run_folder = write_run(tmp_path / 'a', [])
    assert_sentence(run('-m', f'analysis.{script}'), 'which run')
    assert_sentence(run('-m', f'analysis.{script}', tmp_path / 'none'), 'is not a run folder')
    assert_sentence(run('-m', f'analysis.{script}', run_folder, f'--out={tmp_path}/figure'), run_folder)
    assert not list(tmp_path.glob('figure*'))


def test_scores_are_read_by_name_and_solved_for_good(tmp_path):
    runs = []
    for seed in (0, 1):
        runs.append(write_run(tmp_path / f'{seed}', [4.0, 3.0], seed=seed))
        lines = [{'step': step, 'tokens': step, 'seconds': 1.0, 'val': 1.0, 'accuracy_0': a,
                  'accuracy_1': 0.5 + seed / 4, 'levels_solved': 1}
                 for step, a in ((10, 0.99), (20, 0.9), (30, 1.0), (40, 1.0))]
        (tmp_path / f'{seed}/log.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    assert scores.score_names(runs, 'accuracy') == ['accuracy_0', 'accuracy_1']
    points = loss_curves.curve(runs, 'accuracy_1', 'accuracy_1')
    assert [p['step'] for p in points] == [10, 20, 30, 40]
    assert points[0]['mean'] == 0.625 and points[0]['highest'] == 0.75
    assert scores.solved_from(loss_curves.curve(runs, 'accuracy_0', '')) == 30 and scores.solved_from(points) is None
    scores.plot({'a': {'accuracy_0': points, 'accuracy_1': points}, 'b': {'accuracy_0': points}}, tmp_path / 'a.png')
    assert (tmp_path / 'a.png').read_bytes()[:4] == b'\x89PNG'
    with pytest.raises(UserError, match="logged nothing that begins with 'accurcy'"):
        scores.score_names(runs, 'accurcy')
