"""Every architecture side by side: equal parameters, equal budgets, and the results table."""
from types import SimpleNamespace

import pytest
from conftest import run, succeeded
from test_compare import finished_run, given

from analysis import compare, shootout
from analysis.figures import read_csv
from analysis.shootout import Settings
from lm_architectures.files import UserError
from lm_architectures.run.models import count_parameters

DATA = SimpleNamespace(n_ids=257, eos_id=256)
DECODED = {'tokens_per_s_1024': 100.0, 'tokens_per_s_16384': 50.0, 'state_bytes_1024': 4096, 'state_bytes_16384': 65536}


def parameters(method, values):
    return count_parameters(shootout.blank(method.model, values, DATA))


def test_all_models_have_standards_parameters_within_one_percent():
    chosen = shootout.sides(Settings(n_layer=2))
    assert len(chosen) == 8
    target = parameters(chosen['standard'], chosen['standard'].values)
    for method in chosen.values():
        assert parameters(method, shootout.sized(method, DATA, target)) == pytest.approx(target, rel=0.01)
    with pytest.raises(UserError, match='expected standard and some of sps'):
        shootout.sides(Settings(models='sps'))


def test_budgets_are_equal_in_tokens_flops_and_time(monkeypatch, tmp_path):
    s = Settings(models='standard,sps', budget=1e10, seeds=2, block_size=64, n_embd=64, n_layer=2)
    speeds = {'standard': 1000.0, 'sps': 250.0}
    trained = {}

    def set_best_rates(methods, jobs):
        assert methods['sps'].rate == 9e-4
        searched, compared = (given(methods['sps'].run(1e-3, seed)[1]) for seed in (0, 1))
        assert searched == compared | {'seed': '0'}, "the search sees all tokens"
        for method in methods.values():
            method.rate *= 2
    monkeypatch.setattr(shootout, 'set_best_rates', set_best_rates)
    monkeypatch.setattr(compare, 'train_all', lambda commands, jobs: trained.update(commands))
    monkeypatch.setattr(shootout, 'speed', lambda folder: speeds[folder.name.partition('_')[0]])
    runs = shootout.train_cells(s, DATA, tmp_path)
    assert len(runs) == 6 and len(trained) == 2 * (1 + 3)  # Standard's three budgets are equal

    settings = {key: given(trained[folders[0]]) for key, folders in runs.items()}
    tokens = {key: int(own['max_tokens']) for key, own in settings.items()}
    flops = {name: shootout.blank(name, method.values, DATA).flops_per_token(64)
             for name, method in shootout.sides(s).items()}
    step = s.batch_size * s.block_size
    assert tokens['sps', 'tokens'] == tokens['standard', 'tokens'] == tokens['standard', 'wall time']
    assert tokens['standard', 'tokens'] * flops['standard'] == pytest.approx(1e10, abs=flops['standard'] * step)
    assert tokens['sps', 'training FLOPs'] * flops['sps'] == pytest.approx(1e10, abs=flops['sps'] * step)
    assert tokens['sps', 'wall time'] == pytest.approx(tokens['standard', 'tokens'] / 4, abs=step)
    assert settings['sps', 'wall time']['learning_rate'] == '0.0018'
    assert trained[runs['sps', 'wall time'][1]][-1] == '--seed=2'


def test_table_values_follow_from_the_runs(tmp_path):
    losses = {'standard': (2.0, 2.1, 2.3), 'sps': (1.9, 1.8, 2.0)}
    folders = {name: [finished_run(tmp_path / f'{name}_{i}', name, 1000, loss) for i, loss in enumerate(values)]
               for name, values in losses.items()}
    runs = {(name, budget): folders[name] for name in losses for budget in shootout.BUDGETS}
    rows = shootout.table({'standard': 'Standard', 'sps': 'SPS'}, runs, dict.fromkeys(losses, DECODED))
    assert [(row['name'], row['equal']) for row in rows] == [
        (name, budget) for budget in shootout.BUDGETS for name in losses]
    text = shootout.markdown(rows, Settings())
    for part in ('## Equal wall time', '| SPS | ', '1.9000', '1.6516 to 2.1484', '-0.2333'):
        assert part in text, part
    for draw in (shootout.plot, shootout.plot_gaps):
        draw(rows, 'nats per token').savefig(tmp_path / 'shootout.png')
        assert (tmp_path / 'shootout.png').stat().st_size > 10_000


def test_one_model_far_from_the_others_is_off_the_scale():
    def rows(*gaps):
        return [{'minus_first': gap, 'its_low': gap and gap - 0.01, 'its_high': gap and gap + 0.01} for gap in gaps]
    assert shootout.limit(rows(None, 0.1, -0.2, 1.3)) == pytest.approx(0.21)
    assert shootout.limit(rows(None, 0.1, -0.2, 0.3)) == pytest.approx(0.31)


@pytest.mark.long
def test_two_models_run_end_to_end(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(shootout, 'CONTEXTS', (64, 128))
    monkeypatch.setattr(shootout, 'DECODED', 4)
    out = tmp_path / 'out'
    command = ['-m', 'analysis.shootout', f'--data={tiny_data}', '--models=standard,nextlat', '--n_layer=4',
               '--n_embd=64', '--head_size=16', '--block_size=32', '--budget=1e9', '--seeds=1',
               '--eval_tokens=500', f'--out_dir={out}']
    succeeded(run(*command))
    rows = read_csv(out / 'shootout.csv')
    assert [(row['name'], row['equal']) for row in rows] == [
        (name, budget) for budget in shootout.BUDGETS for name in ('standard', 'nextlat')]
    sizes = [int(row['parameters']) for row in rows]
    assert max(sizes) <= 1.02 * min(sizes)
    assert int(rows[0]['state_bytes_128']) > int(rows[0]['state_bytes_64'])
    assert {'RESULTS.md', 'shootout.png', 'shootout_gaps.png'} <= {path.name for path in out.iterdir()}
