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
        results.filled('<!--= quantities() -->\n| a |\n', 'page.md')
    with pytest.raises(UserError, match='alone on their lines'):
        results.filled('A loss of <!--= quantities() -->1.0<!--/-->.', 'page.md')


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


def test_papers_losses_beside_ours_follow_from_their_tables():
    def losses(paper):
        rows = pd.read_csv(ROOT / f'papers/{paper}/paper.csv').set_index('name')
        return rows['validation loss'] if paper == 'sps' else np.log(rows['validation perplexity'])

    def shown(paper, what):
        rows = results.read_quantities(f'papers/{paper}')
        cells = rows[rows.what.str.contains(what, regex=False) & (rows.value == 'loss')].paper
        return [float(number) for number in re.findall(r'[-+]0\.\d{3}', ' '.join(cells))]
    others = 'Transformer++', 'Gated DeltaNet', 'GPN, no memory'
    for paper, what, pairs in (
            ('sps', 'SPS minus Standard (f)', [(f'SPS {size}', f'Standard {size}') for size in ('XS', 'XL')]),
            ('sps', 'SPS minus 2x Memory', [(f'SPS {size}', f'2x Memory {size}') for size in ('XS', 'L')]),
            ('nextlat', 'AdamW', [(f'{name} (d = 1)', 'GPT') for name in ('NextLat', 'MTP', 'JTP')]),
            ('gpn', 'GPN+M', [('GPN+M, 1 layer', name) for name in others])):
        of_paper = losses(paper)
        per_byte = [(of_paper[a] - of_paper[b]) / 4 for a, b in pairs]  # with 4 bytes a sub-word
        assert shown(paper, what) == pytest.approx(per_byte, abs=5.1e-4)
    assert shown('context_ready', 'D = 2 minus N = 2 (h)') == [round(math.log(143.57 / 158.83) / 4, 3)]


# ---- statistics ----

def write_quantity(folder, direction, margin):
    (folder / 'quantities.csv').write_text(
        'what,name,trial,a,b,value,form,millions,direction,margin,paper\n'
        f'W,N,x,a,b,loss,,,{direction},{margin},P\n')


def test_tests_equal_textbook_formulas(tmp_path):
    a, b = (1.0, 1.01, 0.99), (0.8, 1.3, 1.1)
    pd.DataFrame([{'trial': 'x', 'label': label, 'seed': seed, 'kind': '', 'loss': x}
                  for label, numbers in (('a', a), ('b', b)) for seed, x in enumerate(numbers)]
                 ).to_csv(tmp_path / 'runs.csv')
    write_quantity(tmp_path, 'higher', 0.1)
    row = results.tested(tmp_path).iloc[0]  # ROOT / an absolute path is that path
    gaps = [x - y for x, y in zip(a, b)]
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(3)
    assert row.p == pytest.approx(2 * student.sf(abs(mean + 0.1) / error, 2)) and row.p_holm == row.p
    low, high = mean - 4.302653 * error, mean + 4.302653 * error
    assert results.quantities(tmp_path).to_numpy().tolist() == [
        ['W', f'N: {mean:+.3f} ({low:+.3f} to {high:+.3f}), **not seen at this size** (p = {row.p:.1g})', '3', 'P']]


@pytest.mark.parametrize('direction, shift, margin, verdict', [
    ('lower', -1, '', 'same direction'), ('lower', 1, '', 'opposite direction'), ('lower', 1, 1.5, 'within the margin'),
    ('lower', 1, 0.5, 'opposite direction'), ('higher', 1, '', 'same direction'),
    ('higher', -1, '', 'opposite direction')])
def test_a_verdict_needs_the_direction_of_the_claim(direction, shift, margin, verdict, tmp_path):
    (tmp_path / 'runs.csv').write_text('trial,label,seed,kind,loss\n' + ''.join(
        f'x,{label},{seed},,{2 + seed / 10 + (shift + seed / 100) * (label == "a")}\n'
        for label in 'ab' for seed in range(5)))
    write_quantity(tmp_path, direction, margin)
    assert results.tested(tmp_path).verdict.iloc[0] == verdict


def test_a_value_of_one_seed_is_marked_and_a_curve_is_read_where_asked(tmp_path):
    (tmp_path / 'runs.csv').write_text('trial,label,seed,kind,tokens,loss\n' + ''.join(
        f'x,{label},1,minus b,{tokens},{loss}\n' for label, ends in (('a', (0.3, 0.1)), ('b', (0.0, 0.0)))
        for tokens, loss in zip((1_000_000, 2_000_000), ends)))
    (tmp_path / 'quantities.csv').write_text(
        'what,name,trial,a,b,value,form,millions,direction,margin,paper\n'
        'W,1M,x,a,b,loss,,1,,,\nW,2M,x,a,b,loss,,,,,\n')
    assert results.quantities(tmp_path).to_numpy().tolist() == [['W', '1M: +0.300†, 2M: +0.100†', '1', '']]


def test_holm_correction_equals_hand_computed_values():
    for given, corrected in (([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]), ([0.5, 0.6], [1, 1]),
                             ([0.02, 0.02], [0.04, 0.04])):
        assert results.holm(pd.Series(given)).tolist() == pytest.approx(corrected)


def test_seeds_of_rows_whose_runs_are_lost_are_those_stated():
    seeds = [results.seeds(pd.DataFrame({'kind': [kind], 'seed': [7]})) for kind in ('', 'mean of 5', 'minus GPT')]
    assert seeds == ['1', '5', '1']
