"""Claims of the papers: what a verdict is, that each can be computed again, and that the rows name what there is."""
import csv
import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_sentence, run
from scipy import stats
from test_sweep import write_run

from analysis import claims, sweep
from analysis.claims import CLAIMS, CONTRADICTED, NOT_RUN, NOT_SEEN, RUNS, SEEN, STATISTICS, Claim, Settings, judge
from analysis.seeds import difference, equivalence_test
from common.files import UserError
from common.run_settings import read_settings
from train import Settings as TrainSettings

LOW, HIGH, WIDE = [1.0, 1.01, 0.99], [1.2, 1.21, 1.18], [0.8, 1.3, 1.1]


@pytest.mark.parametrize(('ours', 'other', 'direction', 'margin', 'verdict'), [
    (LOW, HIGH, 'lower', 0, SEEN),
    (HIGH, LOW, 'lower', 0, CONTRADICTED),
    (HIGH, LOW, 'higher', 0, SEEN),
    (LOW, WIDE, 'lower', 0, NOT_SEEN),
    (HIGH, LOW, 'lower', 0.3, SEEN),  # `other` is ahead by less than it may be
    (HIGH, LOW, 'lower', 0.1, CONTRADICTED),
    (LOW, HIGH, 'higher', 0.3, SEEN),
    (LOW, [1.005, 1.0, 0.995], 'equal', 0.05, SEEN),
    (LOW, [1.005, 1.0, 0.995], 'equal', 0.01, NOT_SEEN),
    (LOW, HIGH, 'equal', 0.05, CONTRADICTED),
    (HIGH, LOW, 'equal', 0.05, CONTRADICTED),
    (LOW, [1.04, 1.06, 1.05], 'equal', 0.03, NOT_SEEN),  # beyond one margin at 0.036, and there are two margins
    (LOW, [1.5], 'lower', 0, SEEN),  # one number is fixed
    (LOW, [0.5], 'lower', 0, CONTRADICTED),
    (LOW, [0.5], 'higher', 0, SEEN),
    (LOW, [1.0], 'equal', 0.1, SEEN),
    ([1.0] * 3, [2.0] * 3, 'lower', 0, NOT_SEEN),  # nothing varies, so there is no test
])
def test_a_verdict_of_t_is_what_its_test_rejects(ours, other, direction, margin, verdict):
    assert judge(ours, other, direction, 't', margin)['verdict'] == verdict


def test_p_and_intervals_are_those_of_scipy():
    def one_sided(a, b, alternative):
        return stats.ttest_ind(a, b, equal_var=False, alternative=alternative).pvalue
    moved = [x + 0.1 for x in WIDE]
    assert judge(LOW, WIDE, 'lower', 't', 0.1)['p'] == pytest.approx(one_sided(LOW, moved, 'less'))
    assert judge(WIDE, LOW, 'higher', 't', 0.1)['p'] == pytest.approx(one_sided(moved, LOW, 'greater'))
    assert judge(LOW, WIDE, 'equal', 't', 0.3)['p'] == pytest.approx(equivalence_test(LOW, WIDE, 0.3)['p'])
    for direction, alternative in (('lower', 'less'), ('higher', 'greater')):
        p = stats.ttest_1samp(WIDE, 1.0, alternative=alternative).pvalue
        assert judge(WIDE, [1.0], direction, 't', 0)['p'] == pytest.approx(p)
    found = judge(LOW, WIDE, 'lower', 't', 0)
    assert (found['difference'], found['low'], found['high']) == difference(LOW, WIDE)
    found, bounds = judge(WIDE, [1.0], 'lower', 't', 0), stats.ttest_1samp(WIDE, 1.0).confidence_interval()
    assert (found['low'], found['high']) == pytest.approx((bounds.low - 1, bounds.high - 1))


@pytest.mark.parametrize(('ours', 'direction', 'margin', 'p', 'verdict'), [
    ([0.6, 0.7, 0.9], 'higher', 0, 1 / 8, SEEN),
    ([0.6, 0.7, 0.9], 'lower', 0, 1, CONTRADICTED),
    ([0.6, 0.7, 0.4], 'higher', 0, 4 / 8, NOT_SEEN),
    ([0.6, 0.7, 0.51], 'higher', 0.02, 4 / 8, NOT_SEEN),  # one leads by less than counts
    ([0.4, 0.3, 0.49], 'higher', 0.02, 1, NOT_SEEN),
])
def test_a_verdict_of_sign_needs_every_seed(ours, direction, margin, p, verdict):
    found = judge(ours, [0.5] * 3, direction, 'sign', margin)
    assert (found['p'], found['verdict'], found['low']) == (pytest.approx(p), verdict, None)


@pytest.mark.parametrize(('ours', 'other', 'direction', 'verdict'), [
    ([7, 7], [7, 7], 'equal', SEEN), ([7, 8], [7, 7], 'equal', CONTRADICTED), ([7, 7], [8, 8], 'lower', SEEN),
    ([7, 7], [7, 7], 'lower', CONTRADICTED), ([9, 9], [8, 8], 'higher', SEEN), ([0, 0], [0.0], 'equal', SEEN)])
def test_a_verdict_of_exact_has_no_chance_in_it(ours, other, direction, verdict):
    found = judge(ours, other, direction, 'exact', 0)
    assert (found['verdict'], found['p'], found['low']) == (verdict, None, None)


def test_every_claim_names_runs_a_statistic_and_a_test_that_there_are():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) >= 20
    for paper in claims.PAPERS:
        assert sum(claim.paper == paper for claim in CLAIMS) >= 5
    for claim in CLAIMS:
        assert claim.ours in RUNS and (claim.other in RUNS or isinstance(claim.other, float)), claim.name
        assert claim.statistic in STATISTICS and claim.test in ('t', 'sign', 'exact'), claim.name
        assert claim.direction in ('lower', 'higher', 'equal') and claim.section, claim.name
        # an equality over seeds needs room, and a sign a direction and two runs
        assert (claim.test, claim.direction, claim.margin) != ('t', 'equal', 0), claim.name
        assert claim.test != 'sign' or (claim.direction != 'equal' and claim.other in RUNS), claim.name
    assert claims.runs_of(CLAIMS) == RUNS


def test_every_run_is_one_that_train_can_make():
    s = Settings(max_tokens=1e6)
    opened = {}

    def data_of(name):
        if name not in opened:
            opened[name] = claims.open_data(name)
        return opened[name]
    for name, made in RUNS.items():
        tokens, flops = claims.cost(claims.arguments(s, made), data_of)
        assert tokens == (made.tokens or made.times * 1e6) and flops > 1e9, name


def test_a_task_has_its_own_tokens_at_one_rate(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(sweep, 'train_all', lambda cells, jobs: trained.extend(cells.values()))

    def best_rates(methods, first, folder_of, jobs):
        return {name: 2 * first[name] for name in methods}
    monkeypatch.setattr(sweep, 'best_rates', best_rates)
    monkeypatch.setattr(claims, 'settings_of', lambda run: SimpleNamespace(learning_rate=0))
    s = Settings(max_tokens=1000, seeds=2)
    runs, _ = claims.train(s, claims.chosen('nextlat_a5,nextlat_ntp'), tmp_path)
    assert runs['a5_ntp'][1].name == 'a5_ntp_20000000_lr0.001_seed2'
    assert runs['ntp'][0].name == 'ntp_1000_lr0.0026_seed1'
    assert '--max_tokens=20000000' in trained[-1] and '--learning_rate=0.001' in trained[-1]
    claims.train(s, claims.chosen('nextlat_a5'), tmp_path)  # nothing is left to bracket
    assert 'at least 4 runs of training: 80M tokens' in claims.listing(claims.chosen('nextlat_a5'), s)


# ---- the statistics ----

def train_tiny(tmp_path, *args):
    trained = run('train.py', *args, '--n_layer=1', '--max_tokens=512', '--warmup_tokens=0', '--eval_tokens=64',
                  '--sample_tokens=0', '--dtype=float32', f'--out_dir={tmp_path / "run"}')
    assert trained.returncode == 0, trained.stderr
    return tmp_path / 'run'


def test_bytes_of_state_a_token_are_keys_and_values_where_the_state_grows(tmp_path):
    of = STATISTICS['bytes of state a token']
    standard, _ = write_run(tmp_path / 'standard', 'standard', 100, 2.0)
    gpn, _ = write_run(tmp_path / 'gpn', 'gpn', 100, 2.0, d_emb=8, d_k=4, d_v=6)
    keys_and_values = 2 * 2 * 16 * 4  # layers, both, width, bytes
    assert of(standard)['bytes of state a token'] == pytest.approx(keys_and_values, rel=0.3)  # and positions
    assert of(gpn)['bytes of state a token'] == 0


def test_later_gradients_are_geometric_means_of_the_first_and_of_the_last_stream(monkeypatch):
    ratios = torch.tensor([[9, 1, 4, 16], [9, 1, 2, 4]])  # of x and rho over k = 0 to 3
    monkeypatch.setattr(claims.gradient_flow, 'fitted', lambda s, runs: s)
    monkeypatch.setattr(claims.gradient_flow, 'measure', lambda run, s: (run.double(), 0))
    for streams in (ratios, ratios[:1]):
        found = claims.later_gradient(streams)
        assert found['later gradient at x'] == pytest.approx(4)
        assert found['later gradient where it predicts'] == pytest.approx(2 if len(streams) == 2 else 4)


def test_training_that_changes_nothing_does_not_split_memory_heads(tmp_path, monkeypatch):
    rest = [('geometry', 'dead dimensions', '', 0), ('geometry', 'mean magnitude', '', 1),
            ('geometry', 'magnitude', '', 1), ('mean direction', 'cosine between batches', '', 1),
            *(('cosine', 'centred', k, 0) for k in (64, 128)),
            ('mean direction', 'rank correlation with the unigram', '', 0)]

    def measure(model, batches, unigram, show):  # lifetimes that depend on all weights
        lives = 1, 2 + sum(p.detach().double().sum().item() for p in model.parameters()) % 1
        return [*rest, *(('lifetime', f'head {h}', '', life) for h, life in enumerate(lives))]
    monkeypatch.setattr(claims.gpn_state, 'measure', measure)
    folder = train_tiny(tmp_path, 'config/gpn_quick.py', '--n_embd=16', '--d_emb=8', '--d_k=4', '--d_v=4',
                        '--block_size=32', '--batch_size=2', '--learning_rate=1e-12', '--weight_decay=0', '--seed=5')
    assert claims.gpn_states(folder)['doublings of longest over shortest lifetime'] == pytest.approx(0, abs=1e-3)


def test_states_beyond_the_trained_length_are_those_of_p_psi_or_else_of_gpt(tmp_path, monkeypatch):
    asked = []

    def score(model, device, batch_size):
        own = {f'accuracy_{t}': t / 100 for t in range(1, 7)}
        return own | ({f'rnn_accuracy_{t}': t / 10 for t in range(1, 7)} if model == 'nextlat' else {})
    monkeypatch.setattr(claims.a5, 'trained_length', lambda run: 2)
    monkeypatch.setattr(claims, 'open_data', lambda name: asked.append(name) or SimpleNamespace(score=score))
    monkeypatch.setattr(claims, 'load_run', lambda run, device: (run, {}))
    assert [claims.states_beyond(model)['right states beyond the trained length'] for model in ('nextlat', 'ntp')] == [
        pytest.approx(0.45), pytest.approx(0.045)]
    assert asked[0] == 'a5:length=6,val_rows=2000'


# ---- the table ----

@pytest.fixture
def four_claims(tmp_path, monkeypatch):
    """CLAIMS are four, about runs whose losses are given: (out_dir, losses)."""
    losses = {'standard': [2.0, 2.1, 2.05], 'sps': [1.8, 1.85, 1.9], 'sps_w0': [1.81, 1.9, 1.8]}
    monkeypatch.setattr(claims, 'CLAIMS', [
        Claim('a', 'sps', '5', 'lower', 'sps', 'lower', 'standard'),
        Claim('b', 'sps', '5', 'equal', 'sps_w0', 'equal', 'sps', margin=0.2),
        Claim('c', 'gpn', '6', 'a number', 'standard', 'higher', 2.5),
        Claim('d', 'sps', '4', 'as many', 'sps', 'equal', 'standard', 'parameters', 'exact')])
    out = tmp_path / 'out'

    def train_all(cells, jobs):
        for folder in cells:
            name, seed = folder.name.split('_1000_')[0], int(folder.name[-1])
            model = 'standard' if name == 'standard' else 'sps'
            rate = float(folder.name.partition('_lr')[2].partition('_')[0])
            write_run(folder, model, 1000, losses[name][seed - 1], {'learning_rate': rate},
                      **({} if model == 'standard' else {'window': 4}))
    monkeypatch.setattr(sweep, 'train_all', train_all)
    monkeypatch.setattr(sweep, 'best_rates', lambda methods, first, folder_of, jobs: first)
    return out, losses


@pytest.fixture
def judged(four_claims):
    """claims.csv and claims.md of the four."""
    out, _ = four_claims
    assert run('-m', 'analysis.claims', f'--out_dir={out}', '--max_tokens=1000').returncode == 0
    return four_claims


def test_the_table_has_the_verdicts_of_the_runs(judged):
    out, losses = judged
    rows = {row['name']: row for row in csv.DictReader((out / 'claims.csv').open())}
    assert [row['verdict'] for row in rows.values()] == [SEEN, SEEN, CONTRADICTED, SEEN]
    assert float(rows['a']['difference']) == pytest.approx(
        statistics.mean(losses['sps']) - statistics.mean(losses['standard']))
    assert [*map(float, rows['a']['our_numbers'].split())] == losses['sps']
    assert '--learning_rate=0.00135' in rows['a']['other_command'] and rows['c']['other_command'] == ''
    assert rows['d']['our_numbers'] == rows['d']['other_numbers'] and rows['d']['p'] == ''
    text = (out / 'claims.md').read_text()
    for part in ('4 claims: 3 seen, 0 not seen at this size, 1 contradicted, 0 not run', '## A Single-Layer Model',
                 '1.85 (sps)', '-0.2 (', 'core-hours', 'commit', '**contradicted**', 'TOST', 'one sample',
                 'one claim in twenty is called seen', 'Of those seen 1 hold by construction', '\n1. '):
        assert part in text, part


def test_parts_that_are_run_one_by_one_make_one_table(four_claims):
    out, _ = four_claims

    def rows_after(only):
        assert run('-m', 'analysis.claims', f'--only={only}', f'--out_dir={out}', '--max_tokens=1000').returncode == 0
        return {row['name']: row for row in csv.DictReader((out / 'claims.csv').open())}
    first = rows_after('a')
    assert [row['verdict'] for row in first.values()] == [SEEN, NOT_RUN, CONTRADICTED, NOT_RUN]  # c by a's runs
    assert not [*out.glob('sps_w0_*')]
    text = (out / 'claims.md').read_text()
    assert '1 seen, 0 not seen at this size, 1 contradicted, 2 not run' in text
    assert '| (sps_w0) | 1.85 (sps) |  | TOST |  | **not run** |' in text
    then = rows_after('b')
    assert [row['verdict'] for row in then.values()] == [SEEN, SEEN, CONTRADICTED, NOT_RUN]
    assert then['a'] == first['a']
    last_standard, = out.glob('standard_*_seed3')
    (last_standard / 'log.jsonl').write_text('')  # its training is not at its end
    assert rows_after('b')['a']['verdict'] == NOT_RUN
    assert (last_standard / 'log.jsonl').read_text() == ''
    assert rows_after('c')['a'] == first['a']


def test_parts_of_several_machines_are_joined(four_claims, tmp_path):
    out, losses = four_claims
    others = tmp_path / 'others'

    def claims_of(*args):
        assert run('-m', 'analysis.claims', *args, '--max_tokens=1000').returncode == 0
        folder = Path(next(arg for arg in args if 'out_dir' in arg).partition('=')[2])
        rows = {row['name']: row for row in csv.DictReader((folder / 'claims.csv').open())}
        return rows, json.loads((folder / 'parts.json').read_text())['parts']
    first, part = claims_of('--only=a', f'--out_dir={out}')
    losses['sps'] = [2.3, 2.31, 2.32]
    second, other_part = claims_of('--only=a,b', f'--out_dir={others}')
    assert [first[name]['verdict'] for name in 'ab'] == [SEEN, NOT_RUN]
    assert [second[name]['verdict'] for name in 'ab'] == [CONTRADICTED, CONTRADICTED]
    rows, parts = claims_of(f'--join={out},{others}', f'--out_dir={tmp_path / "both"}')
    assert {name: rows[name] for name in 'abc'} == {'a': first['a'], 'b': second['b'] | {'part': '2'}, 'c': first['c']}
    assert rows['d']['verdict'] == NOT_RUN
    assert parts == part + other_part and (tmp_path / 'both/claims.md').read_text().count('core-hours\n') == 2
    before = (tmp_path / 'both/claims.csv').read_bytes()
    into_it = run('-m', 'analysis.claims', '--only=b', f'--out_dir={tmp_path / "both"}', '--max_tokens=1000')
    assert_sentence(into_it, 'has a table that was joined of 2 parts')
    assert (tmp_path / 'both/claims.csv').read_bytes() == before

    path = others / 'claims.csv'
    path.write_text(path.read_text().replace(',0.2,', ',0.3,'))
    joining = run('-m', 'analysis.claims', f'--join={out},{others}', f'--out_dir={tmp_path / "no"}')
    assert_sentence(joining, f'{path} is older than this code: its b is another claim')
    assert not (tmp_path / 'no').exists()


def test_another_budget_does_not_replace_the_verdicts_of_a_folder(judged):
    out, _ = judged
    before = (out / 'claims.csv').read_bytes()
    for arg, part in (('--max_tokens=2000', 'has claims with max_tokens = 1000, and 2000 is asked for'),
                      ('--seeds=4', 'has claims with seeds = 3, and 4 is asked for')):
        assert_sentence(run('-m', 'analysis.claims', f'--out_dir={out}', '--max_tokens=1000', arg), part)
    assert (out / 'claims.csv').read_bytes() == before


def test_verdicts_are_computed_again_from_the_file(judged):
    out, _ = judged
    path, before = out / 'claims.csv', (out / 'claims.md').read_text()

    def again():
        return run('-m', 'analysis.claims', f'--join={out}', f'--out_dir={out}')
    assert again().returncode == 0 and (out / 'claims.md').read_text() == before
    path.write_text(path.read_text().replace('contradicted', 'seen'))
    assert_sentence(again(), "calls c 'seen', its numbers say 'contradicted'")
    path.write_text('name,verdict\na,seen\n')
    assert_sentence(again(), 'has no column our_numbers')
    path.unlink()
    assert_sentence(again(), 'claims.csv')


def test_committed_verdicts_are_those_of_their_numbers():
    folder = ROOT / 'bench/results/claims'
    rows = claims.read_claims(folder / 'claims.csv')
    again, parts = claims.joined([folder])
    for row, found in zip(rows, again, strict=True):
        assert found['verdict'] == row['verdict'], row['name']
        for key in ('difference', 'low', 'high', 'p'):
            assert found[key] == pytest.approx(float(row[key]) if row[key] else None), (row['name'], key)
    assert (folder / 'claims.md').read_text() == claims.markdown(again, parts)
    page = (ROOT / 'RESULTS.md').read_text()
    for paper in {row['paper'] for row in rows}:
        counts = Counter('by construction' if row['verdict'] == SEEN and row['statistic'] in claims.BY_CONSTRUCTION else
                         row['verdict'] for row in rows if row['paper'] == paper)
        in_order = 'seen', 'by construction', 'not seen at this size', 'contradicted', 'not run'
        assert f' | {" | ".join(str(counts[verdict]) for verdict in in_order)} |\n' in page, paper


def test_committed_numbers_are_of_runs_as_they_are_now():
    def options(args):
        config, *rest = args
        return config, dict(arg.split('=') for arg in rest if not arg.startswith('--learning_rate='))
    for row in claims.read_claims(ROOT / 'bench/results/claims/claims.csv'):
        for side, tokens, command in ((row['ours'], row['our_tokens'], row['our_command']),
                                      (row['other'], row['other_tokens'], row['other_command'])):
            if side in RUNS and row['verdict'] != NOT_RUN:
                s = Settings(max_tokens=round(int(tokens) / RUNS[side].times))
                _, _, *trained = command.split()
                assert options(trained) == options(claims.arguments(s, RUNS[side])), row['name']


def test_path_star_is_trained_as_its_config_has_it():
    run = RUNS['star_nextlat']
    trained, in_config = (read_settings(TrainSettings, args)[0] for args in (
        [*claims.arguments(Settings(), run), f'--learning_rate={run.rate}'], ['config/nextlat/path_star_small.py']))
    assert trained == replace(in_config, dtype='float32', eval_tokens=claims.EVAL_TOKENS)


def test_what_is_measured_is_not_measured_again(judged, monkeypatch):
    out, _ = judged

    def again(folder):
        raise AssertionError('measured again')
    monkeypatch.setattr(claims, 'STATISTICS', dict.fromkeys(STATISTICS, again))
    assert run('-m', 'analysis.claims', f'--out_dir={out}', '--max_tokens=1000').returncode == 0


@pytest.mark.parametrize('change', ['log', 'constant'])
def test_what_was_measured_of_another_run_or_with_other_constants_is_measured_again(change, judged, monkeypatch):
    out, losses = judged
    if change == 'log':
        losses['sps'][0] = 1.7
    else:
        monkeypatch.setattr(claims, 'BATCHES', 9)
    measured = []
    monkeypatch.setattr(claims, 'STATISTICS', {name: lambda folder, name=name: measured.append(folder.name) or {name: 1}
                                               for name in STATISTICS})
    assert run('-m', 'analysis.claims', f'--out_dir={out}', '--max_tokens=1000').returncode == 0
    names = {name.split('_1000_')[0] for name in measured}
    assert names == ({'sps'} if change == 'log' else {'sps', 'sps_w0', 'standard'})


def test_claims_are_chosen_by_paper_and_by_name():
    papers = [claim.paper for claim in claims.chosen('gpn,sps_state')]
    assert papers[0] == 'sps' and {*papers[1:]} == {'gpn'}
    assert claims.chosen('all') == CLAIMS
    assert set(claims.runs_of(claims.chosen('sps_state'))) == {'sps', 'standard'}
    with pytest.raises(UserError, match='expected papers'):
        claims.chosen('spx')


def test_a_wrong_setting_is_a_sentence(tmp_path):
    for arg, part in (('--only=spx', "only has 'spx'"), ('--seeds=1', 'seeds is 1'), ('out', "what is 'out'?")):
        assert_sentence(run('-m', 'analysis.claims', f'--out_dir={tmp_path}', arg), part)


def test_the_list_has_the_claims_and_what_they_cost():
    text = run('-m', 'analysis.claims', '--list', '--only=sps_state').stdout
    assert 'sps_state: ' in text and '1 claims, 2 models, at least 10 runs' in text and 'core-hours' in text


@pytest.mark.long
@pytest.mark.parametrize('paper', claims.PAPERS)
def test_all_claims_of_a_paper_from_training_to_the_page(paper, tmp_path, monkeypatch):
    def train_all(cells, jobs):
        for folder, args in cells.items():
            result = run('train.py', *args, f'--out_dir={folder}', '--threads=1')
            assert result.returncode == 0, (folder, result)
    monkeypatch.setattr(sweep, 'train_all', train_all)  # in this process, which spares the imports
    monkeypatch.setattr(sweep, 'best_rates', lambda methods, first, folder_of, jobs: first)
    for name in ('GRADIENT_DOCUMENTS', 'DOCUMENTS', 'PROBE_STEPS', 'PROMPTS', 'BATCHES'):
        monkeypatch.setattr(claims, name, 2)
    monkeypatch.setattr(claims, 'WALKS', 20)
    monkeypatch.setattr(claims, 'RUNS', {name: replace(made, tokens=None) for name, made in RUNS.items()})
    monkeypatch.setattr(claims, 'UNROLLED_TOKENS', 1024)
    out = tmp_path / 'out'
    monkeypatch.setattr(claims, 'EVAL_TOKENS', 1000)
    command = ['-m', 'analysis.claims', f'--only={paper}', '--max_tokens=2000', '--seeds=2', f'--out_dir={out}']
    result = run(*command)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((out / 'claims.csv').open()))
    assert [(row['name'], row['verdict']) for row in rows] == [
        (row['name'], row['verdict']) for row in claims.joined([out])[0]]
    assert [row['name'] for row in rows] == [claim.name for claim in CLAIMS]
    assert all((row['verdict'] == NOT_RUN) == (row['paper'] != paper) for row in rows)
    rows = [row for row in rows if row['paper'] == paper]
    of_training = 'gpn_dead', 'cr_streaming'  # the other exact ones hold of any weights
    exact = [row for row in rows if row['test'] == 'exact' and row['name'] not in of_training]
    assert all(row['verdict'] == SEEN for row in exact), exact
