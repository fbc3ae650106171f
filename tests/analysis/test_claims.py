"""Claims of the papers: statistics, verdicts, and the committed results."""
import math
import statistics
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import assert_sentence, run, succeeded
from scipy.stats import t as student
from test_compare import finished_run

from analysis import claims, compare
from analysis.claims import CLAIMS, DESCRIBED, OPPOSITE, RUNS, SUPPORTED, UNSEEN, Claim
from analysis.figures import read_csv
from lm_architectures.run.run_settings import read_settings
from train import Settings as TrainSettings


def test_intervals_and_p_values_equal_textbook_formulas():
    found = claims.judge([1.0, 1.01, 0.99], [0.8, 1.3, 1.1], 'higher', 0.1)
    gaps = [1.0 - 0.8, 1.01 - 1.3, 0.99 - 1.1]
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(3)
    assert found['difference'] == pytest.approx(mean)
    assert (found['low'], found['high']) == pytest.approx((mean - 4.302653 * error, mean + 4.302653 * error))
    assert found['sd'] == pytest.approx(statistics.stdev(gaps))
    assert found['p'] == pytest.approx(2 * student.sf(abs(mean + 0.1) / error, 2))


def test_the_smallest_effect_is_found_with_its_power():
    effect = claims.smallest_effect(sd=2.0, seeds=5, alpha=0.05)
    rng = torch.Generator().manual_seed(0)
    draws = effect + 2.0 * torch.randn(100_000, 5, generator=rng)
    t = draws.mean(1) / (draws.std(1) / 5 ** 0.5)
    assert (t.abs() > student.ppf(0.975, 4)).double().mean() == pytest.approx(0.8, abs=0.005)


def test_holm_correction_equals_hand_computed_values():
    # sorted: 4 * .005, 3 * .01, 2 * .03, 1 * .04, each at least the one before it
    assert claims.holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert claims.holm([0.5, 0.6], 2) == [1, 1] and claims.holm([0.02, 0.02], 2) == [0.04, 0.04]
    assert claims.holm([], 2) == [] and claims.holm([0.03, 0.01], 7) == pytest.approx([0.18, 0.07])


# ---- the statistics ----

def test_later_gradients_are_geometric_means_of_the_first_and_the_last_stream(monkeypatch):
    ratios = torch.tensor([[9, 1, 4, 16], [9, 1, 2, 4]])  # x and rho, k = 0 to 3
    monkeypatch.setattr(claims.gradient_flow, 'fitted', lambda s, runs: s)
    monkeypatch.setattr(claims.gradient_flow, 'measure', lambda run, s: (run.double(), 0))
    for streams in (ratios, ratios[:1]):
        first, last = (claims.STATISTICS[f'later gradient {where}'](streams) for where in ('at x', 'where it predicts'))
        assert first == pytest.approx(4) and last == pytest.approx(2 if len(streams) == 2 else 4)


# ---- the table ----

def test_claims_can_be_judged_in_several_calls(tmp_path, monkeypatch):
    losses = {'standard': [2.0, 2.1, 2.05], 'sps': [1.8, 1.85, 1.9], 'sps_w0': [1.81, 1.9, 1.8]}
    monkeypatch.setattr(claims, 'CLAIMS', [
        Claim('a', 'sps', '5', 'less', '1 and 2', 'sps', 'lower', 'standard', tested=True),
        Claim('b', 'sps', '5', 'no higher', '1 and 1', 'sps_w0', 'lower', 'sps', tested=True, margin=0.2),
        Claim('c', 'gpn', '6', 'more', '3', 'standard', 'higher', 2.5, tested=True),
        Claim('d', 'gpn', '6', 'less', '', 'sps_w0', 'lower', 'sps', tested=True),
        Claim('e', 'sps', '5', 'less', '', 'a.csv: new', 'lower', 'a.csv: old')])
    monkeypatch.setattr(claims, 'RESULTS', tmp_path)
    out, trained = tmp_path / 'out', set()

    def train_all(cells, jobs):
        for folder in cells:
            name, seed = folder.name.split('_lr')[0], int(folder.name[-1])
            trained.add(name)
            finished_run(folder, 'standard' if name == 'standard' else 'sps', 1000, losses[name][seed - 1],
                         {'learning_rate': float(folder.name.partition('_lr')[2].partition('_')[0])})
    monkeypatch.setattr(compare, 'train_all', train_all)
    monkeypatch.setattr(claims, 'set_best_rates', lambda methods, jobs: None)
    monkeypatch.setattr(claims, 'RUNS', {name: {'search_rate': 'yes', 'arguments': 'config/quickstart.py'}
                                         for name in losses})

    def judged(only):
        trained.clear()
        succeeded(run('-m', 'analysis.claims', f'--only={only}', f'--out_dir={out}', '--seeds=3'))
        return {row['name']: row for row in read_csv(out / 'claims.csv')}, (out / 'claims.md').read_text()
    first, _ = judged('a')
    assert list(first) == ['a'] and trained == {'sps', 'standard'}
    rows, text = judged('b,gpn')
    assert [row['verdict'] for row in rows.values()] == [SUPPORTED, SUPPORTED, OPPOSITE, UNSEEN]
    assert rows['a'] == first['a'] and float(rows['a']['p_holm']) == 2 * float(first['a']['p'])
    assert [*map(float, rows['a']['our_numbers'].split())] == losses['sps']
    assert '--learning_rate=0.0009' in rows['a']['other_command'] and rows['c']['other_command'] == ''
    assert '4 claims: 2 supported, 1 not seen at this size, 1 opposite here, 0 described' in text
    claims.CLAIMS[0] = replace(claims.CLAIMS[0], margin=0.1)  # a changed claim, so its numbers are outdated
    assert list(judged('b')[0]) == ['b', 'c', 'd']
    (tmp_path / 'a.csv').write_text('model,tokens,losses\nold,7,2.0 2.5 3.0\n')
    with mock.patch.object(claims, 'CLAIMS', claims.CLAIMS[4:]):  # a comparison that has not been run
        assert_sentence(run('-m', 'analysis.claims', f'--out_dir={out}'), 'have not been run: a.csv: new')
    (tmp_path / 'a.csv').write_text('model,tokens,losses\nold,7,2.0 2.5 3.0\nnew,7,1.0 1.5 2.0\n')
    row = judged('e')[0]['e']
    assert (row['difference'], row['our_command'], row['verdict'], row['p']) == (
        '-1.0', 'bench/results/a.csv: new', DESCRIBED, '')


def test_every_claim_names_runs_a_statistic_and_a_test_that_exist():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) <= 20
    for claim in CLAIMS:
        compared = '.csv: ' in claim.ours and '.csv: ' in str(claim.other)
        assert compared or claim.ours in RUNS and (claim.other in RUNS or isinstance(claim.other, float)), claim.name
        assert claim.statistic in claims.STATISTICS and claim.paper in claims.PAPERS, claim.name
        assert claim.direction in ('lower', 'higher'), claim.name
    assert {side for claim in CLAIMS for side in (claim.ours, claim.other) if side in RUNS} == set(RUNS)


@pytest.mark.parametrize('name', RUNS)
def test_train_accepts_every_run(name):
    settings, _, _ = read_settings(TrainSettings, claims.arguments(name))
    assert 10 * settings.warmup_tokens < settings.max_tokens


def test_learning_rates_are_searched_only_for_loss_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, 'train_all', lambda cells, jobs: None)
    monkeypatch.setattr(claims, 'set_best_rates',
                        lambda methods, jobs: [setattr(method, 'rate', 2 * method.rate) for method in methods.values()])
    runs = claims.train(claims.Settings(seeds=2), claims.select_claims('cr_contraction,nextlat_ntp'), tmp_path)
    assert runs['cr_d2'][1].name == 'cr_d2_lr0.00044_seed2'
    assert runs['ntp'][0].name == 'ntp_lr0.0088_seed1'


def test_claims_are_selected_and_listed_by_paper_or_name(tmp_path):
    papers = [claim.paper for claim in claims.select_claims('gpn,sps_window')]
    assert papers[0] == 'sps' and {*papers[1:]} == {'gpn'} and claims.select_claims('all') == CLAIMS
    text = run('-m', 'analysis.claims', '--list', '--only=sps_separation').stdout
    assert text.startswith('sps_separation: ') and 'loss 3.065, 3.073 (XS)' in text and text.count('\n') == 2
    assert_sentence(run('-m', 'analysis.claims', f'--out_dir={tmp_path}', '--only=spx'), "only has 'spx'")


@pytest.mark.long
@pytest.mark.parametrize('paper', claims.PAPERS)
def test_all_claims_of_a_paper_run_end_to_end(paper, tmp_path, monkeypatch):
    def train_all(cells, jobs):
        for folder, args in cells.items():
            succeeded(run('train.py', *args, f'--out_dir={folder}', '--threads=1', '--eval_tokens=1000'))
    monkeypatch.setattr(compare, 'train_all', train_all)  # in this process, without new imports
    monkeypatch.setattr(claims, 'set_best_rates', lambda methods, jobs: None)
    made = claims.arguments
    monkeypatch.setattr(claims, 'arguments', lambda name: [
        *(arg for arg in made(name) if 'tokens=' not in arg and '--data=' not in arg),
        '--max_tokens=2000', '--warmup_tokens=100'])
    for module, few in ((claims.gradient_flow, dict(n_documents=2)), (claims.context_ready, dict(tokens=1024)),
                        (claims.probes, dict(steps=2)),
                        (claims.gpn_state, dict(batch_size=4))):
        monkeypatch.setattr(module, 'Settings', lambda made=module.Settings, few=few, **own: made(**own | few))
    succeeded(run('-m', 'analysis.claims', f'--only={paper}', '--seeds=2', f'--out_dir={tmp_path}/out'))
    assert list(claims.saved_rows(tmp_path / 'out/claims.csv')) == [
        c.name for c in CLAIMS if c.paper == paper and claims.has_runs(c)]
