"""The committed results: tables of the pages follow from the rows, statistics from textbooks."""
import math
import re
import statistics

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from scipy.stats import t as student

from analysis import results
from lm_architectures.files import UserError

FOLDERS = 'papers', *results.PAPERS


def check(*argv):
    """Return the exit status of python -m analysis.results."""
    with pytest.raises(SystemExit) as end:
        results.main(list(argv))
    return end.value.code


def test_tables_and_figure_follow_from_the_committed_runs():
    assert check('--check') == 0, 'stale: run python -m analysis.results'


@pytest.mark.parametrize('folder, trial, label', [
    ('papers', 'f, training FLOPs', 'GDN'), ('papers/sps', 'g', 'Standard'), ('papers/nextlat', 'c, Muon, 3M', 'JTP')])
def test_a_changed_row_turns_the_check_red(folder, trial, label, monkeypatch, capsys):
    rows, original = results.runs(folder), results.runs
    changed = rows.assign(loss=rows.loss + 0.1 * ((rows.trial == trial) & (rows.label == label)))
    monkeypatch.setattr(results, 'runs', lambda name: changed if name == folder else original(name))
    before = (ROOT / 'RESULTS.md').read_bytes()
    assert check('--check') == 1 and (ROOT / 'RESULTS.md').read_bytes() == before
    stale = ['docs/equal_flops.png'] * (trial == 'f, training FLOPs') + ['RESULTS.md']
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == sorted(stale)


def test_a_mark_without_its_end_is_a_sentence():
    with pytest.raises(UserError, match='page.md: marks .* in pairs'):
        results.filled('<!--= tests() -->\n| a |\n', 'page.md')
    with pytest.raises(UserError, match='alone on their lines'):
        results.filled('A loss of <!--= tests() -->1.0<!--/-->.', 'page.md')


@pytest.mark.parametrize('folder', FOLDERS)
def test_rows_are_runs_or_say_what_is_left_of_them(folder):
    rows = results.runs(folder)
    assert not rows.duplicated(['trial', 'label', 'seed', 'kind', 'learning_rate', 'tokens', *(
        {'draft_len'} & {*rows})]).any()
    assert rows.kind.str.fullmatch(r'|(mean|lowest|highest) of \d|minus .+').all()
    assert rows[rows.kind == ''].loss.dropna().between(0.5, 6).all()
    page = (ROOT / 'bench/results/README.md').read_text()
    listed = {name for cell in re.findall(r'^\| (.*?) \|', page, re.MULTILINE) for name in cell.split('; ')}
    assert {re.sub(r'(A5), .*', r'\1, 1 to 12 elements', name) for name in rows.trial.unique()} <= listed


def test_papers_numbers_beside_ours_follow_from_their_tables():
    def perplexity(folder):
        return pd.read_csv(ROOT / folder / 'paper.csv').set_index('name')['validation perplexity']

    def shown(folder):
        rows = pd.read_csv(ROOT / folder / 'quantities.csv')
        return {row.name: float(row.paper) for row in rows[rows.b.notna()].itertuples()}
    gpn, nextlat = perplexity('papers/gpn'), perplexity('papers/nextlat')
    for ours, others, of_paper in (
            (gpn['GPN+M, 1 layer'], {'GDN': gpn['Gated DeltaNet'], 'Transformer': gpn['Transformer++'],
                                     'GPN': gpn['GPN, no memory']}, shown('papers/gpn')),
            (nextlat['NextLat (d = 1)'], {'GPT': nextlat['GPT'], 'MTP': nextlat['MTP (d = 1)']},
             shown('papers/nextlat'))):
        assert {name: round(math.log(ours / other) / 4, 3) for name, other in others.items()} == of_paper


# ---- statistics ----

def test_tests_equal_textbook_formulas(tmp_path, monkeypatch):
    a, b = (1.0, 1.01, 0.99), (0.8, 1.3, 1.1)
    pd.DataFrame([{'trial': 'x', 'label': label, 'seed': seed, 'kind': '', 'loss': x}
                  for label, numbers in (('a', a), ('b', b)) for seed, x in enumerate(numbers)]
                 ).to_csv(tmp_path / 'runs.csv')
    (tmp_path / 'tests.csv').write_text('test,trial,a,b,value,direction,margin\nT,x,a,b,loss,higher,0.1\n')
    row = results.tested(tmp_path).iloc[0]  # ROOT / an absolute path is that path
    gaps = [x - y for x, y in zip(a, b)]
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(3)
    assert (row['mean'], row.low, row.high) == pytest.approx((mean, mean - 4.302653 * error, mean + 4.302653 * error))
    assert (row.sd, row.p) == pytest.approx((statistics.stdev(gaps), 2 * student.sf(abs(mean + 0.1) / error, 2)))
    assert row.smallest == pytest.approx(results.smallest_effect(row.sd, 3, 0.05)) and row.p_holm == row.p
    assert row.verdict == 'not seen at this size'


@pytest.mark.parametrize('direction, shift, margin, verdict', [
    ('lower', -1, '', 'same direction'), ('lower', 1, '', 'opposite direction'), ('lower', 1, 1.5, 'within the margin'),
    ('lower', 1, 0.5, 'opposite direction'), ('higher', 1, '', 'same direction'),
    ('higher', -1, '', 'opposite direction')])
def test_a_verdict_needs_the_direction_of_the_claim(direction, shift, margin, verdict, tmp_path):
    (tmp_path / 'runs.csv').write_text('trial,label,seed,kind,loss\n' + ''.join(
        f'x,{label},{seed},,{2 + seed / 10 + (shift + seed / 100) * (label == "a")}\n'
        for label in 'ab' for seed in range(5)))
    (tmp_path / 'tests.csv').write_text(f'test,trial,a,b,value,direction,margin\nT,x,a,b,loss,{direction},{margin}\n')
    assert results.tested(tmp_path).verdict.iloc[0] == verdict


def test_the_smallest_effect_is_found_with_its_power():
    effect = results.smallest_effect(sd=2.0, seeds=5, alpha=0.05)
    draws = np.random.default_rng(0).normal(effect, 2.0, (100_000, 5))
    t = draws.mean(1) / (draws.std(1, ddof=1) / 5 ** 0.5)
    assert (abs(t) > student.ppf(0.975, 4)).mean() == pytest.approx(0.8, abs=0.005)


def test_holm_correction_equals_hand_computed_values():
    for given, corrected in (([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]), ([0.5, 0.6], [1, 1]),
                             ([0.02, 0.02], [0.04, 0.04])):
        assert results.holm(pd.Series(given)).tolist() == pytest.approx(corrected)


def test_seeds_of_rows_whose_runs_are_lost_are_those_stated():
    seeds = [results.seeds(pd.DataFrame({'kind': [kind], 'seed': [7]})) for kind in ('', 'mean of 5', 'minus GPT')]
    assert seeds == ['1', '5', '']
