"""Models side by side: what may be compared, which runs are trained, and the table by hand."""
import math
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import assert_sentence, run
from test_sweep import write_run

from analysis import compare, sweep
from analysis.compare import Settings, read_sides
from analysis.seeds import difference
from common.runs import make_config, model_file

SMALL = '--n_layer=1 --n_head=2 --n_embd=16'


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(sweep, 'pick_device', lambda name: 'cpu')


def test_each_side_is_a_command_of_its_own():
    s = Settings(data='somewhere', max_tokens=5000)
    sides = read_sides(s, ['GPN+M, two: config/gpn_quick.py --n_layer=2',
                           'GDN: config/gdn_quick.py --learning_rate=1e-3'])
    assert sides['GPN+M, two'].args == ['config/gpn_quick.py', '--n_layer=2', '--data=somewhere', '--max_tokens=5000',
                                        '--dtype=float32']
    assert [side.rate for side in sides.values()] == [3e-3, 1e-3]
    assert sides['GPN+M, two'].folder == 'GPN_M_two'


@pytest.mark.parametrize('arguments, sentence', [
    (['a: config/gpn_quick.py'], 'what is to be compared?'),
    (['config/gpn_quick.py', 'b: config/gdn_quick.py'], "'config/gpn_quick.py' has no name"),
    (['a: config/gpn_quick.py', 'a: config/gdn_quick.py'], "'a: config/gdn_quick.py' has the name of another"),
    (['a: config/gpn_quick.py --seed=3', 'b: config/gdn_quick.py'], 'a: seed is given for each run here'),
    (['a: config/gpn_quick.py --n_layers=3', 'b: config/gdn_quick.py'], "did you mean 'n_layer'"),
    (['a: config/gpn_quick.py', 'b: config/gdn_quick.py --max_tokens=9e6'],
     'a has max_tokens = 2000000, b has 9000000'),
    (['a: config/gpn_quick.py', 'b: config/gdn_quick.py --eval_tokens=100'], 'b has 100: expected one for all'),
    (['a: config/gpn_quick.py', 'b: config/gdn_quick.py --block_size=64'], 'a has block_size = 256, b has 64'),
    (['a: config/gpn_quick.py', 'b: config/gdn_quick.py --dtype=bfloat16'], 'a has dtype = float32, b has bfloat16'),
    (['G+M: config/gpn_quick.py', 'G-M: config/gdn_quick.py'], 'names its runs G_M, as another does')])
def test_what_cannot_be_compared_is_a_sentence(arguments, sentence, tmp_path):
    assert_sentence(run('-m', 'analysis.compare', *arguments, f'--out_dir={tmp_path}/out'), sentence)
    assert not (tmp_path / 'out').exists()


def test_rates_are_bracketed_then_every_seed_is_trained_once(tmp_path, monkeypatch):
    trained, run_command = [], subprocess.run

    def train(command, **kwargs):
        if 'train.py' not in command:  # git, for the commit
            return run_command(command, **kwargs)
        given = dict(arg[2:].split('=') for arg in command if '=' in arg)
        rate, loss = float(given['learning_rate']), {'standard': 2.0, 'gpn': 1.0}[given['model']]
        trained.append((given['model'], rate, int(given['seed'])))
        values = {key: int(given[key]) for key in ('n_layer', 'd_k', 'd_v') if key in given}
        write_run(Path(given['out_dir']), given['model'], int(given['max_tokens']),
                  loss + abs(math.log(rate / 1e-3)) + int(given['seed']) / 10,
                  {'learning_rate': rate, 'seed': int(given['seed']), 'data': 'somewhere',
                   'dtype': given['dtype']}, **values)
        return SimpleNamespace(stderr='')
    monkeypatch.setattr(subprocess, 'run', train)
    monkeypatch.setattr(sweep, 'checksum', lambda data: '')
    sides = f'a: --model=standard {SMALL}', f'b: --model=gpn {SMALL} --d_k=8 --d_v=8'
    for _ in range(2):  # the second time nothing is left to train
        result = run('-m', 'analysis.compare', *sides, f'--out_dir={tmp_path}', '--jobs=1',
                     '--data=somewhere', '--max_tokens=100')
        assert result.returncode == 0, result.stderr
    assert len(trained) == len(set(trained))
    for model in ('standard', 'gpn'):
        rate, = {rate for name, rate, seed in trained if name == model and seed == 3}
        assert rate == pytest.approx(1e-3, rel=0.25)
        assert {seed for name, r, seed in trained if (name, r) == (model, rate)} == {1, 2, 3}
        rates = {r for name, r, _ in trained if name == model}
        assert min(rates) < rate < max(rates)
    assert '| a |' in result.stdout and '| minus a |' in result.stdout
    assert {'compare.csv', 'compare.md'} <= {path.name for path in tmp_path.iterdir()}


def test_the_table_is_that_of_its_runs(tmp_path):
    losses, runs = {'a': (2.0, 2.1, 2.3), 'b': (2.2, 2.4, 2.3), 'c': (1.0, 1.0, 1.1)}, {}
    for name, model in (('a', 'standard'), ('b', 'standard.NanoGPT'), ('c', 'gpn')):
        values = dict(d_emb=8, d_k=4, d_v=6, n_layer=1) if model == 'gpn' else {}
        runs[name] = [write_run(tmp_path / f'{model}_{i}', model, 1000, loss, **values)[0]
                      for i, loss in enumerate(losses[name])]
    a, b, c = compare.table(runs)
    assert (b['loss'], b['perplexity']) == pytest.approx((statistics.mean(losses['b']), math.exp(2.3)))
    assert (b['minus_first'], b['its_low'], b['its_high']) == difference(losses['b'], losses['a'])
    assert a['minus_first'] is None
    half = 4.302653 * statistics.stdev(losses['a']) / math.sqrt(3)
    assert a['high'] - a['loss'] == pytest.approx(half, rel=1e-6)
    assert b['state_bytes'] is None, "nanoGPT's shape has no cache"
    model = model_file('gpn').Model(make_config('gpn', dict(n_layer=1, n_head=2, n_embd=16, d_emb=8, d_k=4, d_v=6,
                                                            vocab_size=320, n_ids=257, eos_id=256, scan='loop')))
    assert c['state_bytes'] == model.new_cache(1, 8).nbytes and c['parameters'] == sum(
        p.numel() for p in model.parameters())
    text = compare.markdown([a, b, c], 'About it.')
    assert '+0.1667' in text and '1,234' in text and 'commit' in text and 'About it.' in text and '| minus a |' in text
