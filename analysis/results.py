"""Fill the tables of the pages from the committed runs: python -m analysis.results.

A table stands between two marks, alone on their lines, with the Python expression that makes it:

    <!--= table('papers/sps', 'Standard', {'loss': (loss, 'g'), 'FLOPs, ratio': (ratio, 'g')}) -->
    <!--/-->

FOLDER/runs.csv has a row for each run: its trial (bench/results/trials.md), label and seed. `kind`
marks rows whose runs are lost: 'mean of 5', 'lowest of 5', 'highest of 5' (seeds), or 'minus GPT',
a difference from that label. FOLDER/tests.csv and quantities.csv say what is computed from them.
--check writes nothing: the exit status is 1 if a page or figure is stale.
"""
import re
import sys
from dataclasses import dataclass
from functools import cache
from io import BytesIO

import numpy as np
import pandas as pd
from scipy import optimize, stats

from analysis.figures import gap_text, markdown, new_figure
from analysis.runs import by_seed, compared, interval
from lm_architectures.files import ROOT, UserError, friendly_errors, write_file
from lm_architectures.settings import load_settings

PAGES = 'README.md', 'RESULTS.md', 'docs/*.md', 'papers/*/README.md'
FIGURE = 'docs/equal_flops.png'  # of README.md
PAPERS = 'papers/sps', 'papers/context_ready', 'papers/nextlat', 'papers/gpn'
MARK = re.compile(r'^(<!--= (.+?) -->\n)(.*?)^<!--/-->$', re.DOTALL | re.MULTILINE)
ALPHA = 0.05  # family-wise significance level of a paper's tests


@dataclass
class Settings:
    check: bool = False  # only say what is stale


# ---- rows ----

@cache
def runs(folder: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / folder / 'runs.csv', dtype={'kind': str}).fillna({'kind': ''})


def trial(folder: str, name: str) -> pd.DataFrame:
    return runs(folder)[runs(folder).trial == name]


# ---- cells: functions of the rows of a trial ----

def loss(rows: pd.DataFrame, label: str, first: str) -> str:
    return f'{by_seed(rows)[label].mean():.3f}'


def minus(rows: pd.DataFrame, label: str, first: str, value: str = 'loss', millions: float = np.inf) -> str:
    """Return a value minus that of `first`, by seed: '+0.037 (+0.005 to +0.069)'.

    Curves of differences are read at their end, or after about so many million tokens.
    """
    own = rows[rows.label == label]
    if own.empty or rows.kind.any():
        return ''.join(own[own.tokens < 1.05e6 * millions][value].tail(1).map('{:+.3f}'.format))
    if label == first:
        return f'loss {loss(rows, label, first)}'
    values = by_seed(rows, value)
    return gap_text(*interval(values[label] - values[first])[['mean', 'low', 'high']])


def ratio(rows: pd.DataFrame, label: str, first: str, column: str = 'flops') -> str:
    values = rows.groupby('label')[column].last()
    return f'{values[label] / values[first]:.2f}'


def spread(rows: pd.DataFrame, value: str, form: str) -> str:
    """Return mean, lowest and highest of a value: '0.52 (0.49 to 0.61)'.

    Where a run has several rows (learning rates, lengths of drafts), its best counts.
    """
    best = rows.groupby(['label', 'seed', 'kind'], dropna=False)[value].agg('min' if value == 'loss' else 'max')
    found = best.agg(['mean', 'min', 'max'])
    if rows.kind.any():
        found = rows.set_index(rows.kind.str.split().str[0])[value][['mean', 'lowest', 'highest']]
    mean, low, high = (f'{x:{form}}' for x in found)
    return mean if low == high else f'{mean} ({low} to {high})'


def seeds(rows: pd.DataFrame) -> str:
    return rows.kind.iloc[0].partition(' of ')[2] if rows.kind.any() else str(rows.seed.nunique())


# ---- tables ----

def table(folder: str, first: str, columns: dict[str, tuple]) -> pd.DataFrame:
    """Return a row for each label of the first column's trial.

    columns: {title: (function of the cells, trial, its further arguments)}.
    """
    found, labels = {}, []
    for title, (cell, name, *arguments) in columns.items():
        rows = trial(folder, name)
        labels = labels or list(dict.fromkeys([first, *rows.label]))
        found[title] = [cell(rows, label, first, *arguments) for label in labels]
    return pd.DataFrame({f'compared with {first}': labels, **found})


def quantities(folder: str) -> pd.DataFrame:
    """Return a paper's quantities, here and there: differences from `b` if it is given."""
    found = {}
    for row in pd.read_csv(ROOT / folder / 'quantities.csv', keep_default_na=False).itertuples():
        rows, name = trial(folder, row.trial).dropna(subset=row.value), row.name and f'{row.name}: '
        own = rows[rows.label.isin(row.a.split(' | '))]
        here = minus(rows, row.a, row.b, row.value) if row.b else spread(own, row.value, row.form)
        cells = f'{name}{here}', seeds(own), row.paper and f'{name}{row.paper}'
        found.setdefault(row.quantity, []).append(cells)
    return pd.DataFrame([[quantity, *(', '.join(dict.fromkeys(filter(None, column))) for column in zip(*cells))]
                         for quantity, cells in found.items()], columns=['quantity', 'here', 'seeds', 'the paper'])


# ---- tests ----

def holm(p_values: pd.Series) -> pd.Series:
    """Correct p-values by Holm's method."""
    ordered = p_values.sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)[p_values.index]


def smallest_effect(sd: float, seeds: int, alpha: float, power: float = 0.8) -> float:
    """Return the effect that a two-sided paired t-test at level alpha finds with this power."""
    critical = stats.t.ppf(1 - alpha / 2, seeds - 1)
    return sd / seeds ** 0.5 * optimize.brentq(lambda shift: stats.nct.sf(critical, seeds - 1, shift) - power, 0, 1000)


def tested(folder: str) -> pd.DataFrame:
    """Return the tests of a paper with difference, interval, p-values and verdict.

    Each is a two-sided t-test of a minus b by seed, from the margin by which a may be worse.
    """
    rows = pd.read_csv(ROOT / folder / 'tests.csv').fillna({'margin': 0})
    found = []
    for row in rows.itertuples():
        values = by_seed(trial(folder, row.trial), row.value)
        gaps, sign = (values[row.a] - values[row.b]).dropna(), {'lower': 1, 'higher': -1}[row.direction]
        found.append({**interval(gaps), 'sd': gaps.std(), 'p': stats.ttest_1samp(sign * gaps - row.margin, 0).pvalue,
                      'agrees': sign * gaps.mean() < row.margin,
                      'smallest': smallest_effect(gaps.std(), len(gaps), ALPHA / len(rows))})
    rows = rows.join(pd.DataFrame(found))
    rows['p_holm'] = holm(rows.p)
    rows['verdict'] = np.select([rows.p_holm >= ALPHA, rows.agrees & (rows.margin > 0), rows.agrees],
                                ['not seen at this size', 'within the margin', 'same direction'], 'opposite direction')
    return rows


def tests() -> pd.DataFrame:
    """Return the tests of all papers."""
    rows = pd.concat(map(tested, PAPERS))
    return pd.DataFrame({
        'test': rows.test, 'difference': rows['mean'].map('{:+.4f}'.format),
        '95%': rows.low.map('{:+.4f}'.format) + ' to ' + rows.high.map('{:+.4f}'.format),
        'sd': rows.sd.map('{:.4f}'.format), 'smallest': rows.smallest.map('{:.4f}'.format),
        'p (Holm)': rows.p_holm.map('{:.2g}'.format), 'verdict': rows.verdict, 'the paper': rows.paper.fillna('')})


# ---- figures ----

def draw_gaps(folder: str, name: str, first: str) -> tuple:
    """Return a figure of losses minus that of `first`, outliers off the scale, and its numbers."""
    found = compared(trial(folder, name), first=first).drop(first).sort_values('minus_mean', ascending=False)
    mean, low, high = (found[column] for column in ('minus_mean', 'minus_low', 'minus_high'))
    *_, second, largest = sorted(np.maximum(low.abs(), high.abs()))
    edge = 1.25 * (second if largest > 3 * second else largest)
    figure, (axes,) = new_figure('', size=(8.3, 0.35 * len(found) + 1.1))
    axes.barh(found.index, mean.clip(upper=edge), color=[f'C{i}' for i in range(len(found))], height=0.6,
              xerr=[(mean - low).where(mean < edge), (high - mean).where(mean < edge)], capsize=3)
    for y, (x, end) in enumerate(zip(mean, high)):
        text, place = (f'{x:+.2f}', max(0, end)) if x < edge else (f'off the scale: {x:+.2f}', 0)
        axes.annotate(text, (place, y), (5, 0), textcoords='offset points', va='center')
    axes.grid(False, axis='y')
    axes.set(xlabel=f"loss minus {first}'s, nats per byte (negative is better; 95% intervals)",
             xlim=(1.4 * low.min(), edge))
    return figure, ', '.join(f'{label} {gap_text(*row)}' for label, *row in zip(found.index, mean, low, high))


# ---- the pages ----

def filled(text: str, page: str) -> str:
    """Return the text of a page with its tables made anew."""
    if len(MARK.findall(text)) != text.count('<!--='):
        raise UserError(f'{page}: marks <!--= EXPRESSION --> and <!--/--> must stand alone on their lines, in pairs')
    return MARK.sub(lambda mark: f'{mark[1]}{markdown(eval(compile(mark[2], page, "eval")))}\n<!--/-->', text)


def stale() -> dict:
    """Return {path: new content} where a page or the figure does not follow from the rows."""
    found = {}
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        old = path.read_text(encoding='utf-8')
        if (new := filled(old, str(path.relative_to(ROOT)))) != old:
            found[path] = new.encode()
    figure, shown = draw_gaps('papers', 'f, training FLOPs', 'Standard')
    if not (ROOT / FIGURE).exists() or shown.encode() not in (ROOT / FIGURE).read_bytes():
        figure.savefig(png := BytesIO(), dpi=200, metadata={'Description': shown})
        found[ROOT / FIGURE] = png.getvalue()
    return found


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, _, _ = load_settings(Settings, argv)
        for path, content in (found := stale()).items():
            print(f'{path.relative_to(ROOT)} {"is stale: python -m analysis.results" if s.check else "is filled"}')
            if not s.check:
                write_file(path, content)
        sys.exit(int(s.check and bool(found)))


if __name__ == '__main__':
    main()
