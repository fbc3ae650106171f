"""SPS's significance tests against textbook formulas."""
import math
import statistics

import pandas as pd
import pytest
from conftest import assert_sentence, run, succeeded
from scipy.stats import t as student
from test_analysis import family_run

from papers.sps import seeds

LOSSES = {'standard': (3.10, 3.13, 3.11), 'sps': (3.06, 3.07, 3.068), 'two_x_memory': (3.085, 3.083, 3.081),
          'delayed_state': (3.080, 3.082, 3.086)}


def welch(a, b, shift=0.0):
    """Return Welch's t of mean(a) - mean(b) - shift, and its degrees of freedom."""
    u, v = (statistics.variance(x) / len(x) for x in (a, b))
    degrees = (u + v) ** 2 / (u ** 2 / (len(a) - 1) + v ** 2 / (len(b) - 1))
    return (sum(a) / len(a) - sum(b) / len(b) - shift) / math.sqrt(u + v), degrees


@pytest.mark.parametrize('a, b', [('sps', 'standard'), ('delayed_state', 'two_x_memory'), ('standard', 'sps')])
def test_seed_statistics_equal_textbook_formulas(a, b):
    a, b = LOSSES[a], (*LOSSES[b], 3.09)  # different lengths
    gap, (t, degrees) = sum(a) / 3 - sum(b) / 4, welch(a, b)
    assert seeds.lower_test(a, b) == pytest.approx(dict(gap=gap, t=t, degrees=degrees, p=student.cdf(t, degrees)))
    worse = max(welch(a, b, 0.01)[0], welch(b, a, 0.01)[0])
    assert seeds.equivalence_test(a, b, 0.01) == pytest.approx(
        dict(gap=gap, t=worse, degrees=degrees, p=student.cdf(worse, degrees)))


def test_groups_with_several_seeds_are_tested(tmp_path):
    runs = [family_run(tmp_path / f'{method}_{seed}', method, [9.0, loss], seed=seed)
            for method, losses in LOSSES.items() for seed, loss in enumerate(losses)]
    alone = family_run(tmp_path / 'alone', 'reverse_sps', [9.0, 3.0])
    command = '-m', 'papers.sps.seeds', *runs, alone, '--labels=standard,sps,2x,delayed,reverse', f'--out={tmp_path}/t'
    succeeded(run(*command, '--better=sps', '--alike=delayed;2x'))
    tests = pd.read_csv(tmp_path / 't.csv')
    assert [(row.a, row.b) for row in tests.itertuples()] == [
        ('sps', 'standard'), ('sps', '2x'), ('sps', 'delayed'), ('delayed', '2x')]
    assert tests.p[0] == pytest.approx(seeds.lower_test(LOSSES['sps'], LOSSES['standard'])['p']) and tests.p[0] < 0.05
    assert tests.p[3] == pytest.approx(
        seeds.equivalence_test(LOSSES['delayed_state'], LOSSES['two_x_memory'], 0.01)['p'])
    assert_sentence(run(*command, '--better=reverse'),
                    "no test of 'reverse': labels with several seeds: standard; sps; 2x; delayed")
    assert_sentence(run(*command), 'which test?')
