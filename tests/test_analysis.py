"""Figures from run folders: what is averaged, and where lines cross."""
import json

import pytest

from analysis import loss_curves
from config import UserError


def write_run(folder, losses, model='standard', seed=0, settings=None, **values):
    folder.mkdir()
    settings = {'model': model, 'block_size': 8, 'seed': seed, 'learning_rate': 1.0} | (settings or {})
    (folder / 'config.json').write_text(json.dumps({'model': model, 'settings': settings, 'model_config': values, 'versions': {},
                                                    'data': {'tokenizer': 'byte', 'n_ids': 257, 'eos_id': 256, 'sha256': ''}}))
    lines = [json.dumps({'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i} | ({} if loss is None else {'val': loss})) for i, loss in enumerate(losses)]
    (folder / 'log.jsonl').write_text('\n'.join(lines) + '\n{"step": 9, "to')  # the last line was cut by a kill
    return str(folder)


def test_seeds_are_averaged_and_settings_that_differ_make_the_label(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, None, 2.0]), write_run(tmp_path / 'b', [4.0, 9.0, 3.0], seed=1, settings={'threads': 4}),
            write_run(tmp_path / 'c', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='sps', window=64),
            write_run(tmp_path / 'd', [4.0, 3.5, 2.0], 'sps', settings={'learning_rate': 2.0}, method='two_x_memory', window=None)]
    groups = loss_curves.group(runs)
    assert groups == {'standard, learning_rate=1.0': runs[:2], 'sps, learning_rate=2.0': [runs[2]], 'two_x_memory, learning_rate=2.0': [runs[3]]}
    assert loss_curves.curve(runs[:2])[1] == {'tokens': 200, 'minutes': 2.0, 'mean': 2.5, 'lowest': 2.0, 'highest': 3.0, 'seeds': 2}


def test_crossing_is_where_a_line_goes_below_for_good():
    line = lambda *losses: [{'tokens': i, 'mean': loss} for i, loss in enumerate(losses)]
    first = line(5, 4, 3, 2)
    assert loss_curves.crossing(line(6, 3, 4, 1.9), first, 'tokens') == 3
    assert loss_curves.crossing(line(6, 3, 2, 1), first, 'tokens') == 1
    assert loss_curves.crossing(line(6, 3, 2, 2.5), first, 'tokens') is None
    assert loss_curves.crossing(line(6, 5, 3.1, 2, 1, 1), first, 'tokens') is None  # beyond the first line's end nothing is compared


def test_runs_without_a_common_step_are_a_sentence(tmp_path):
    runs = [write_run(tmp_path / 'a', [4.0, None]), write_run(tmp_path / 'b', [None, 3.0], seed=1)]
    with pytest.raises(UserError, match='no validation loss that all of these runs logged'):
        loss_curves.curve(runs)
