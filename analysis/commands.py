"""Figures and tables of any runs. Runs that differ only in the seed are averaged.

    python -m analysis curves RUN RUN ...                 validation loss over tokens, time, FLOPs
    python -m analysis curves RUN RUN ... --minus=LABEL   differences by seed
    python -m analysis final RUN RUN ...                  final losses, gaps to the first model's
    python -m analysis final RUN RUN ... --paper=sps      and scores of eval.py, beside a paper's
    python -m analysis final RUN RUN ... --x=window       over a setting, or over `parameters`
    python -m analysis match RUN RUN ...                  tokens to reach the other's loss

--y=accuracy: another logged value instead of the loss, or a score of eval.py, such as
--y='piqa acc_norm'. A+B: the mean of both. Writes NAME.csv and NAME.png (`final` also NAME.md), by
default beside the first run. Intervals are 95% by Student's t. See a command's --help.
"""
import math
import re
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from analysis import figures
from analysis import runs as tables
from lm_architectures.data.generated import SOLVED
from lm_architectures.files import ROOT, UserError, friendly_errors, warn_once
from lm_architectures.score.scoring import perplexity

AXES = {'tokens': 'training tokens', 'gpu_hours': 'training time, GPU-hours', 'minutes': 'training time, minutes',
        'flops': 'training FLOPs'}
SAME_SIZE = 1.1  # models within this ratio of parameter counts are the same size
LENGTH = {'max_tokens', 'schedule', 'decay_fraction', 'min_lr'}  # settings of the length and the decay
SHARES = 'accuracy', 'solved', 'valid', 'next_token'  # scores of tasks from 0 to 1 start with these


@dataclass
class Curves(figures.Settings):
    y: tuple[str, ...] = ('val',)  # logged values: A,B, or NAME* for all that start alike; A+B: their mean
    minus: str | None = None  # label whose runs are subtracted from all others, seed by seed


@dataclass
class Final(figures.Settings):
    y: str = 'val'  # a logged value or a score of eval.py; A+B: their mean
    minus: str | None = None  # label whose runs are subtracted from all others, seed by seed
    x: str | None = None  # a setting, or `parameters`, on the x axis
    paper: Literal['sps', 'nextlat', 'gpn'] | None = None  # add the scores and rows of this paper's table


# ---- over training ----

def held_from(held: pd.Series) -> pd.Series:
    """Return True from where a condition holds to the end."""
    return held[::-1].astype(int).cummin()[::-1].astype(bool)


def crossing(points: pd.DataFrame, first: pd.DataFrame, axis: str) -> float | None:
    """Return the place on an axis from which `points` stay below the curve `first`, or None."""
    points = points[points[axis].between(first[axis].iloc[0], first[axis].iloc[-1])]
    below = points[held_from(points['mean'] < np.interp(points[axis], first[axis], first['mean']))]
    return below[axis].iloc[0] if len(below) else None


def points_of(runs: pd.DataFrame, s: Curves) -> pd.DataFrame:
    """Return the `curve` of s.y for each label. If there are several values, labels name them."""
    log, values, parts = tables.read_logs(runs), {}, []
    for name in s.y:
        found = ({column: [column] for column in log.select_dtypes('number') if column.startswith(name[:-1])}
                 if name.endswith('*') else {name: name.split('+')})
        if not found or not {*sum(found.values(), [])} <= {*log}:
            raise UserError(f'{" ".join(runs.folder)}: no {name} was logged')
        values |= found
    for name, columns in values.items():
        points = tables.curve(log.assign(y=log[columns].mean(axis=1, skipna=False)), 'y', s.minus)
        for label in [label for label in runs.label.unique() if label not in {*points.label}]:
            warn_once(f'left out: {label}: no {name} that all of its runs logged at the same step'
                      + (f' as {s.minus}' if s.minus else ''))
        parts.append(points.assign(label=points.label + (f', {name}' if len(values) > 1 else '')))
    return pd.concat(parts)


def curves(runs: pd.DataFrame, s: Curves) -> dict:
    """Draw s.y over tokens, time and FLOPs. Prints its end, and where it stays below the first."""
    runs = tables.labeled(runs, s.labels)
    points = points_of(runs, s)
    if points.empty:
        raise UserError(f'no curve of {", ".join(s.y)} to draw for {"; ".join(runs.label.unique())}')
    ends = points.groupby('label', sort=False).tail(1)
    shown = ['label', 'mean', 'lowest', 'highest', 'seeds', 'step', 'tokens', 'minutes']
    if all(name.startswith(SHARES) for name in s.y):
        solved = points[points.groupby('label')['mean'].transform(lambda y: held_from(y >= SOLVED)).astype(bool)]
        ends = ends.join(solved.groupby('label').step.first().rename('solved from'), on='label')
        shown.append('solved from')
    figures.show(ends, *shown)
    time = 'gpu_hours' if points.gpu_hours.notna().all() else 'minutes'
    axes_of = [axis for axis in ('tokens', time, 'flops') if points[axis].notna().all()]
    (_, first), *others = points.groupby('label', sort=False)
    for label, own in others if s.y == ('val',) else ():
        places = [(AXES[axis], crossing(own, first, axis)) for axis in axes_of]
        print(f'{label} is below the first curve ' + ', '.join(
            f'never over {what}' if x is None else f'from {tables.short_number(x)} {what} on' for what, x in places))
    figure, panels = figures.new_figure(title(', '.join(s.y), s.minus), len(axes_of), (5.5, 5))
    for axes, axis in zip(panels, axes_of):
        figures.draw(axes, points, axis)
        set_axes(axes, points, AXES[axis])
    figures.add_legend(figure, figures.BAND, 'lower center', ncols=2)
    return {'.csv': points, '.png': figure}


def title(y: str, minus: str | None) -> str:
    """Return what a figure shows."""
    return ('validation loss, nats per token' if y == 'val' else y) + (f', minus {minus}' if minus else '')


def set_axes(axes, points: pd.DataFrame, xlabel: str) -> None:
    """Set both axes (x ticks: 2 M, 20 G). The top of y ignores each curve's first quarter."""
    from matplotlib.ticker import EngFormatter
    by_label = points.groupby('label')
    late = points[by_label.cumcount() >= by_label.tokens.transform('size') // 4]
    margin = max(0.04 * (late.highest.max() - points.lowest.min()), 1e-3)
    axes.set(xlabel=xlabel, xlim=(0, None), ylim=(points.lowest.min() - margin, late.highest.max() + margin))
    if axes.get_xlim()[1] >= 1000:  # not minutes
        axes.xaxis.set_major_formatter(EngFormatter())


# ---- tokens to match a loss (SPS paper, figures 1 and 2) ----

def constant_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the curve at the constant learning rate.

    runs: differ only in length and seed. The shortest counts up to its decay, then the longer ones,
    which may have been stopped. Columns `last`, `budget`: tokens of the last evaluation before the
    decay, and where it begins.
    """
    parts, starts = [], [-1]
    for max_tokens, own in runs.groupby('max_tokens'):  # ascending
        log = tables.read_logs(own if parts else tables.finished(own))
        points = tables.curve(log[log.lr >= log.learning_rate * (1 - 1e-9)])  # neither warm-up nor decay
        parts.append(points[points.tokens > starts[-1]])
        run = own.iloc[0]
        if parts[0].empty:
            raise UserError(f'{run.folder}: no evaluation between warm-up and decay')
        starts.append(int(max_tokens * (1 - run.decay_fraction)) if run.schedule == 'wsd' else max_tokens)
    return pd.concat(parts).assign(last=parts[0].tokens.iloc[-1], budget=starts[1])


def match(runs: pd.DataFrame, s: figures.Settings) -> dict:
    """Return when each model reaches the baseline's last loss, and the other way round.

    Both are compared at the constant learning rate. The baseline is the first label, and its last
    loss is the last one before the shortest run's decay.
    """
    def has_constant_rate(run):
        if run.schedule == 'cosine':
            raise UserError(f'{run.folder} has schedule = cosine, without a constant learning rate: expected wsd or '
                            'constant')
    runs = tables.passing(runs, has_constant_rate)
    runs = tables.labeled(runs, s.labels, LENGTH | of_size(runs))
    rows, drawn, baseline = [], {}, runs.label.iloc[0]
    for size, own in runs.groupby(sizes(runs.parameters)):
        size, found = tables.short_number(size), {
            label: constant_rate(of_label) for label, of_label in own.groupby('label', sort=False)}
        if baseline not in found or len(found) < 2:
            warn_once(f'left out: the runs of {size} parameters are {"; ".join(found)}: expected {baseline}, the '
                      'baseline, and others')
            continue
        drawn[size] = pd.concat(found.values())
        rows += [{'size': size, **matched(found, *pair)} for other in found if other != baseline
                 for pair in ((other, baseline), (baseline, other))]
    if not rows:
        raise UserError('expected runs of a baseline and of another model of the same size')
    figures.show(rows, 'size', 'loss_of', 'loss', 'budget', 'by', 'searched', 'tokens', 'tokens_ratio')
    figure, panels = figures.new_figure('Tokens to match a loss, at the constant learning rate', len(drawn), (6, 5.5))
    style_of = figures.styles(runs.label)
    for axes, (size, points) in zip(panels, drawn.items()):
        figures.draw(axes, points, 'tokens', style_of=style_of)
        for row in [row for row in rows if row['size'] == size and row['tokens']]:
            axes.annotate('', (row['tokens'], row['loss']), (row['evaluated_at'], row['loss']),
                          arrowprops={'arrowstyle': '->', 'color': style_of[row['by']]['color']})
        set_axes(axes, points, f'training tokens, {size} parameters')
    figures.add_legend(figure, f'{figures.BAND}\nArrow: from a loss to where the other matches it', 'lower center')
    return {'.csv': pd.DataFrame(rows), '.png': figure}


def matched(found: dict[str, pd.DataFrame], target: str, by: str) -> dict:
    """Return a row of `match`: the tokens at which `by` reaches the target's last loss, or None."""
    points, others = found[target], found[by]
    last, = points[points.tokens == points['last']].itertuples()
    reached = others[others['mean'] <= last.mean].tokens
    tokens = None if reached.empty else int(reached.iloc[0])
    return {'loss_of': target, 'loss': last.mean, 'evaluated_at': last.tokens, 'budget': last.budget, 'by': by,
            'searched': others.tokens.iloc[-1], 'tokens': tokens, 'tokens_ratio': tokens and tokens / last.budget}


# ---- at the end of training ----

def sizes(parameters: pd.Series) -> pd.Series:
    """Return a common size of models within SAME_SIZE: their smallest number of parameters."""
    if parameters.isna().any():
        raise UserError('sizes are unknown: the file of a model is missing (--model=PATH, --code=run)')
    found = {}
    for n in sorted(parameters.unique()):
        found[n] = next((size for size in found.values() if n <= SAME_SIZE * size), n)
    return parameters.map(found)


def of_size(runs: pd.DataFrame) -> set[str]:
    """Return the settings that all runs of a model share at each size, such as n_embd."""
    text = runs.drop(columns=[*tables.MEASURED], errors='ignore').map(repr)
    shared = (text.groupby([runs.model, sizes(runs.parameters)]).nunique() <= 1).all()
    return {*text.columns[shared]} - {'model', 'seed'}


def with_values(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the finished runs with a column `y`: the last logged value or score, or a mean A+B."""
    runs, names = tables.finished(runs), name.split('+')
    if name == 'val':
        return runs.assign(y=runs.loss)
    values = {folder: tables.last_values(folder) for folder in runs.folder}

    def check(run):
        if missing := {*names} - {*values[run.folder]}:
            raise UserError(f'{run.folder} has no {min(missing)!r}: expected a logged value or a score of eval.py')
    runs = tables.passing(runs, check)
    return runs.assign(y=[float(np.mean([values[folder][key] for key in names])) for folder in runs.folder])


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each label: size and costs of its first seed, and `compared` of column y."""
    costs = runs.groupby('label', sort=False)[['parameters', 'state_bytes', 'learning_rate', 'tokens', 'flops',
                                               'tokens_per_s', 'memory_gib', 'minutes', 'gpus']].first()
    values = runs.groupby('label', sort=False).y.agg(lambda own: ' '.join(repr(float(y)) for y in own))
    return costs.join(tables.compared(runs, 'y')).join(values.rename('values')).reset_index()


def formatted(rows: pd.DataFrame, what: str = 'loss') -> str:
    """Format the rows of `table` in Markdown."""
    columns = {'parameters': ('parameters', ','), 'bytes of state': ('state_bytes', ',.0f'),
               'lr': ('learning_rate', '.2g'), 'tokens': ('tokens', ','), 'FLOPs': ('flops', '.3g'),
               'tokens/s': ('tokens_per_s', ',.0f'), 'seeds': ('n', '.0f'), what: ('mean', '.4f')}
    shown = pd.DataFrame({'model': rows.label} | {
        title: ['' if pd.isna(x) else f'{x:{form}}' for x in rows[name]] for title, (name, form) in columns.items()})
    shown['95%'] = [f'{low:.4f} to {high:.4f}' if low == low else '' for low, high in zip(rows.low, rows.high)]
    if len(rows) > 1:
        gaps = rows[['minus_mean', 'minus_low', 'minus_high']].to_numpy()[1:]
        shown[f'minus {rows.label[0]} (95%)'] = ['', *(figures.gap_text(*gap) for gap in gaps)]
    return figures.markdown(shown)


def final(runs: pd.DataFrame, s: Final) -> dict:
    """Compare the last values of s.y, in a table or over the setting s.x."""
    if s.x and s.x not in runs:
        raise UserError(f'x is {s.x!r}: expected a setting of these runs, such as learning_rate, or parameters')
    ignored = {s.x} - {None} | (of_size(runs) if s.x == 'parameters' else set())
    runs = with_values(tables.labeled(runs, s.labels, ignored), s.y)
    return over(runs, s) if s.x else side_by_side(runs, s)


def side_by_side(runs: pd.DataFrame, s: Final) -> dict:
    """Compare the values of the column y, in a table. s.minus is the first label."""
    if s.minus:
        runs = pd.concat([tables.baseline(runs, s.minus), runs[runs.label != s.minus]])
    rows, what = table(runs), 'loss' if s.y == 'val' else s.y
    text, written = formatted(rows, what), {'.csv': rows}
    if s.paper:
        written['_paper.csv'] = beside = beside_paper(runs, s.paper)
        text += f'\n\n{figures.markdown(beside)}'
    print(text)
    figure, (axes,) = figures.new_figure(what, size=(2.5 + 1.4 * len(rows), 4.5))
    for i, row in rows.iterrows():
        own = runs[runs.label == row.label].y
        axes.plot([i + 0.12] * len(own), own, 'o', markersize=3, color=f'C{i}', alpha=0.6)
        half = row.high - row['mean'] if row.high == row.high else None
        axes.errorbar(i, row['mean'], half, fmt='D', markersize=5, capsize=6, color=f'C{i}')
    axes.set_xticks(range(len(rows)), rows.label.str.replace(', ', '\n'))
    axes.set(xlim=(-0.6, len(rows) - 0.4), title='diamond: mean with 95% interval; dots: seeds')
    return written | {'.md': f'{text}\n', '.png': figure}


def over(runs: pd.DataFrame, s: Final) -> dict:
    """Draw the values of the column y over s.x, inf if diverged. s.minus is subtracted by seed."""
    values = sizes(runs.parameters) if s.x == 'parameters' else runs[s.x]  # None: no limit, or not of this model
    is_ordered = values.dropna().map(type).isin((int, float)).all()
    if is_ordered:
        text, absent, place = tables.short_number, 'all', values.astype(float)
        place = place.fillna(2 * place.max() if place.max() > 0 else 1)  # no limit: beyond the largest
    else:
        text, absent, place = str, 'none', pd.factorize(values.map(str))[0]
    runs = runs.assign(place=place, **{s.x: values.map(text, na_action='ignore').fillna(absent)})
    if s.minus:
        runs = tables.relative(runs, 'y', s.minus, 'place')
    labels = [*runs.label.unique()]
    runs = runs.sort_values(['label', 'place'], key=lambda own: own.map(labels.index) if own.name == 'label' else own)
    points = tables.averaged(runs, ['label', 'place', s.x], 'y')
    figures.show(points, 'label', s.x, 'mean', 'lowest', 'highest', 'seeds')
    figure, (axes,) = figures.new_figure('Final ' + title(s.y, s.minus))
    figures.draw(axes, points, 'place', **({} if is_ordered else {'linestyle': ''}))
    dots = {'linestyle': '', 'marker': 'o'}
    figures.draw(axes, runs, 'place', 'y', markersize=2, label='seeds', **dots)
    if s.y == 'val' and not s.minus:
        lowest = points.loc[best(points, s.x, is_ordered)]
        figures.draw(axes, lowest, 'place', markersize=12, fillstyle='none', label='lowest mean', **dots)
    if len(diverged := runs[runs.y == math.inf]):
        axes.plot(diverged.place, [0.97] * len(diverged), 'kx', transform=axes.get_xaxis_transform(), label='diverged')
    ticks = points.drop_duplicates('place')
    if is_ordered and ticks.place.max() >= 8 * (smallest := ticks.place[ticks.place > 0].min()):
        axes.set_xscale('symlog', linthresh=smallest)  # logarithmic, with a place for 0
    axes.set_xticks(ticks.place, ticks[s.x])
    axes.set(xlabel=s.x)
    figures.add_legend(figure, figures.BAND)
    return {'.csv': points.drop(columns='place'), '.png': figure}


def best(points: pd.DataFrame, x: str, is_ordered: bool) -> list:
    """Return the index of each label's lowest mean. Prints it, and says if it is at an end of x."""
    found = []
    for label, own in points.groupby('label', sort=False):
        found.append(i := own['mean'].idxmin())
        print(f'{label}: the lowest mean, {own["mean"][i]:.4f}, is at {x} = {own[x][i]}')
        if is_ordered and len(own) > 1 and i in own.index[[0, -1]] and own[x][i] != 'all':
            warn_once(f'{label}: {x} = {own[x][i]} is at the edge of the grid, so a better value may lie beyond it')
    return found


# ---- a paper's own numbers ----

MEANS = {'corpus NLL': ' nats_per_word', 'task accuracy, %': ', %'}  # column: ending of the columns it averages


def beside_paper(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a row of texts for each label, followed by the paper's row if one has its settings.

    papers/NAME/paper.csv is the paper's table. Columns without a space are settings that identify a
    run; an empty cell matches any value. The others are numbers: a score of eval.py, in percent if
    the name ends in ', %', or those of `numbers`.
    """
    paper = pd.read_csv(ROOT / f'papers/{name}/paper.csv', dtype=str, keep_default_na=False)
    columns, rows = [column for column in paper if ' ' in column], []
    settings = paper.columns.drop(['name', *columns])
    for label, own in runs.groupby('label', sort=False):
        values = pd.DataFrame([numbers(run, columns) for _, run in own.iterrows()], dtype=float)
        means = values.mean(skipna=False).dropna()
        rows.append({'run': label} | {c: f'{value:.{decimals(paper[c])}f}' for c, value in means.items()})
        for _, row in paper.iterrows():
            if all(str(own.iloc[0].get(key)) == row[key] for key in settings if row[key]):
                rows.append({'run': f'paper: {row["name"]}', **{c: row[c] for c in columns if row[c]}})
    found = pd.DataFrame(rows).fillna('')
    return found[[column for column in ['run', *columns] if column in found]]


def numbers(run: pd.Series, columns: list[str]) -> dict[str, float]:
    """Return a run's numbers for these columns of a paper's table. What is unknown is NaN."""
    scores = tables.last_values(run.folder)
    found = {c: (100 if c.endswith(', %') else 1) * scores.get(c.removesuffix(', %'), math.nan) for c in columns}
    found |= {'validation loss': run.loss, 'validation perplexity': perplexity(run.loss),
              'state dim': run.get('n_embd'), 'memory cells': run.memory_cells}
    found |= {mean: np.mean([found[c] for c in columns if c.endswith(ending) and c not in MEANS])
              for mean, ending in MEANS.items() if mean in columns}
    return {column: found[column] for column in columns}


def decimals(texts: pd.Series) -> int:
    """Return the number of decimals that a paper prints, 3 if it prints none of these numbers."""
    return max((len(text.partition('.')[2]) for text in texts if re.fullmatch(r'[\d.]+', text)), default=3)


# ---- the command line ----

COMMANDS = {'curves': (Curves, curves), 'final': (Final, final), 'match': (figures.Settings, match)}


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        argv = [*(sys.argv[1:] if argv is None else argv)]
        name = next((arg for arg in argv if arg in COMMANDS), None)
        if name:
            Settings, analyze = COMMANDS[name]
            argv.remove(name)
            figures.script(Settings, f'analysis {name}')(analyze)(argv)
        elif {*argv} <= {'-h', '--help'}:
            print(__doc__)
        else:
            raise UserError(f'expected python -m analysis {"|".join(COMMANDS)} RUN RUN ..., see its --help')
