"""Validation loss over training tokens, time and FLOPs, averaged over seeds.

    python -m analysis.loss_curves RUN RUN ... --out=NAME
    python -m analysis.loss_curves RUN RUN ... --minus=standard --out=NAME      differences by seed

Writes NAME.png (a line per configuration) and NAME.csv. Prints where each line drops below the
first for good (figure 2 of the SPS paper). Times are from the runs' logs, so compare runs on one
machine; if all runs used GPUs, they are GPU-hours (wall time times GPUs at the start of the run).
FLOPs are from `flops_per_token`. The y axis is cut to hide the steep first quarter of each curve.
"""
from dataclasses import dataclass

import numpy as np

from analysis import figures
from analysis.runs import curve, curves_of, group, holds_from, short_number
from lm_architectures.files import UserError

AXES = {'tokens': 'training tokens', 'gpu_hours': 'training time, GPU-hours', 'minutes': 'training time, minutes',
        'flops': 'training FLOPs'}


@dataclass
class Settings(figures.Settings):
    minus: str | None = None  # label whose runs are subtracted from all others, seed by seed


def crossing(points: list[dict], first: list[dict], axis: str) -> float | None:
    """Return the place on an axis from which `points` stay below the curve `first`, or None."""
    x, y = [p[axis] for p in first], [p['mean'] for p in first]
    comparable = [p for p in points if x[0] <= p[axis] <= x[-1]]
    where = holds_from(comparable, lambda p: p['mean'] < np.interp(p[axis], x, y))
    return where and where[axis]


def crossings(points: list[dict], first: list[dict]) -> list[str]:
    """Format the `crossing` on each axis that both curves have."""
    found = {AXES[axis]: crossing(points, first, axis) for axis in axes_of([points, first])}
    return [f'never over {what}' if where is None else f'from {short_number(where)} {what} on'
            for what, where in found.items()]


def axes_of(curves: list[list[dict]]) -> list[str]:
    """Return the AXES that all curves have. Minutes are drawn only without GPU-hours."""
    known = [axis for axis in AXES if all(points[-1][axis] is not None for points in curves)]
    return [axis for axis in known if axis != 'minutes' or 'gpu_hours' not in known]


def plot(curves: dict[str, list[dict]], minus: str | None = None):
    """Draw {label: points} in a panel per axis. minus: the label that was subtracted."""
    drawn_over, what = axes_of(list(curves.values())), 'difference' if minus else 'validation loss'
    title = f'Validation loss minus that of {minus}' if minus else 'Validation loss'
    figure, panels = figures.new_figure(title, len(drawn_over), (5.5, 5))
    for axes, axis in zip(panels, drawn_over):
        figures.draw(axes, figures.labeled(curves), axis)
        set_axes(axes, list(curves.values()), AXES[axis], what)
    figures.add_legend(figure, figures.BAND, 'lower center', ncols=2)
    return figure


def set_axes(axes, curves: list[list[dict]], xlabel: str, what: str = 'validation loss') -> None:
    """Label both axes (x ticks: 2 M, 20 G). The top of y ignores each curve's first quarter."""
    from matplotlib.ticker import EngFormatter
    lowest = min(p['lowest'] for points in curves for p in points)
    highest = max(p['highest'] for points in curves for p in points[len(points) // 4:])
    margin = max(0.04 * (highest - lowest), 1e-3)
    axes.set(xlabel=xlabel, xlim=(0, None), ylabel=f'{what}, nats per token', ylim=(lowest - margin, highest + margin))
    if axes.get_xlim()[1] >= 1000:  # not minutes
        axes.xaxis.set_major_formatter(EngFormatter())


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    groups = group(runs, labels=s.labels) if s.minus else {None: []}
    if s.minus not in groups:
        raise UserError(f'minus is {s.minus!r}: expected one of {"; ".join(groups)}')
    reference = {run.settings.seed: run for run in groups[s.minus]}
    curves = curves_of(runs, lambda own: curve(own, minus=reference), labels=s.labels)
    figures.show(figures.labeled({label: points[-1:] for label, points in curves.items()}),
                 'label', 'mean', 'lowest', 'highest', 'seeds', 'tokens', 'minutes')
    (_, first), *others = curves.items()
    for label, points in others:
        print(f'{label} is below the first curve {", ".join(crossings(points, first))}')
    return {'.csv': figures.labeled(curves), '.png': plot(curves, s.minus)}


if __name__ == '__main__':
    main()
