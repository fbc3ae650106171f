"""Fill the tables of the pages from the committed runs: python -m analysis.results.

A table stands between two marks, alone on their lines, with the Python expression that makes it:

    <!--= table('papers', 'Standard', {'loss': (minus, 'f, tokens')}) -->
    <!--/-->

FOLDER/runs.csv has a row for each run: its trial (bench/results/trials.md), label and seed. `kind`
marks rows whose runs are lost: 'mean of 5', 'lowest of 5', 'highest of 5' (seeds), or 'minus GPT',
a difference from that label. FOLDER/quantities.csv says what a paper's table shows of them.
--check writes nothing: the exit status is 1 if a page or figure is stale.
"""
import re
import sys
from dataclasses import dataclass
from functools import cache
from io import BytesIO

import numpy as np
import pandas as pd
from scipy import stats

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
    """Return the rows of a trial: one of this folder, or one of all papers (papers/runs.csv)."""
    rows = pd.concat(map(runs, dict.fromkeys(['papers', folder])))
    return rows[rows.trial == name]


# ---- cells: functions of the rows of a trial ----

def gaps(rows: pd.DataFrame, a: str, b: str, value: str = 'loss') -> pd.Series:
    """Return a value of label a minus that of b, for each seed. Curves are read at their end."""
    values = by_seed(rows.drop_duplicates(['label', 'seed'], keep='last'), value)
    return (values[a] - values[b]).dropna()


def minus(rows: pd.DataFrame, label: str, first: str, value: str = 'loss') -> str:
    """Return the gap between two labels, '+0.037 (+0.005 to +0.069)', or the loss of `first`."""
    if label == first:
        return f'loss {by_seed(rows)[label].mean():.3f}'
    return gap_text(*interval(gaps(rows, label, first, value))[['mean', 'low', 'high']])


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
    return rows.kind.iloc[0].partition(' of ')[2] or str(rows.seed.nunique())


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


def read_quantities(folder: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / folder / 'quantities.csv', dtype=str, keep_default_na=False)


def measured(folder: str, row) -> pd.DataFrame:
    """Return the rows of runs that a row of quantities.csv is computed from."""
    rows = trial(folder, row.trial).dropna(subset=row.value)
    rows = rows[rows.label.isin([*row.a.split(' | '), row.b])]
    return rows[rows.tokens < 1.05e6 * float(row.millions)] if row.millions else rows


def quantities(folder: str) -> pd.DataFrame:
    """Return the table of a paper. Rows of quantities.csv with the same `what` share a row of it.

    If `b` is given, a difference of a and b is shown or, where form is 'ratio', their ratio. Rows
    with a `direction` are tests. `millions` is where curves are read. † marks a value of one seed.
    """
    found, tests = {}, tested(folder)
    for row in read_quantities(folder).itertuples():
        rows = measured(folder, row)
        if row.b:
            here = (ratio if row.form == 'ratio' else minus)(rows, row.a, row.b, row.value)
        else:
            here = spread(rows, row.value, row.form)
        here = f'{row.name}: ' * bool(row.name) + here + '†' * (seeds(rows) == '1')
        if row.direction:
            here += f', **{tests.verdict[row.Index]}** (p = {tests.p_holm[row.Index]:.1g})'
        found.setdefault(row.what, []).append([here, seeds(rows), row.paper])
    return pd.DataFrame([[what, *(', '.join(dict.fromkeys(filter(None, column))) for column in zip(*cells))]
                         for what, cells in found.items()], columns=['what', 'here', 'seeds', 'the paper'])


# ---- tests ----

def holm(p_values: pd.Series) -> pd.Series:
    """Correct p-values by Holm's method."""
    ordered = p_values.sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)[p_values.index]


def tested(folder: str) -> pd.DataFrame:
    """Return the tests among a paper's quantities, with p-values and verdict.

    Each is a two-sided t-test of a minus b by seed, from the margin by which a may be worse.
    """
    rows = read_quantities(folder).query('direction != ""').assign(mean=0.0, p=1.0)
    rows['margin'] = pd.to_numeric(rows.margin).fillna(0)
    for row in rows.itertuples():
        values = {'lower': 1, 'higher': -1}[row.direction] * gaps(measured(folder, row), row.a, row.b, row.value)
        rows.loc[row.Index, ['mean', 'p']] = values.mean(), stats.ttest_1samp(values - row.margin, 0).pvalue
    rows['p_holm'], agrees = holm(rows.p), rows['mean'] < rows.margin
    rows['verdict'] = np.select([rows.p_holm >= ALPHA, agrees & (rows.margin > 0), agrees],
                                ['not seen at this size', 'within the margin', 'same direction'], 'opposite direction')
    return rows


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
