"""Validation loss against training tokens, time and FLOPs, runs that differ only in the seed averaged.

    python -m analysis.loss_curves RUN RUN ... --out=NAME

Writes NAME.png (a line per configuration, a band from the lowest to the highest seed) and NAME.csv, and prints where
each line goes below the first one's for good, as figure 2 of the SPS paper does. Time is that of the runs' own logs:
compare runs that had the same machine. Where all runs were on GPUs it is GPU-hours, wall time times the GPUs that the
run began with. FLOPs are the model's `flops_per_token`. A run that cannot be drawn is left out, and named.

The picture begins where the steep start is over, after a quarter of each line, so that the ends can be told apart; the
CSV has all of it.
"""
from dataclasses import dataclass

import numpy as np

from analysis import figures
from common.files import friendly_errors

AXES = {'tokens': 'tokens', 'gpu_hours': 'GPU-hours', 'minutes': 'minutes', 'flops': 'FLOPs'}


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: loss_curves beside the runs


# ---- where curves cross ----

def crossing(points: list[dict], first: list[dict], axis: str) -> float | None:
    """Return where `points` go below the curve `first` and stay there, or None."""
    where = None
    x, y = [p[axis] for p in first], [p['mean'] for p in first]
    for p in points:
        other = np.interp(p[axis], x, y, left=np.nan, right=np.nan)  # beyond its ends nothing is compared
        if p['mean'] >= other:
            where = None
        elif p['mean'] < other and where is None:
            where = p[axis]
    return where


def crossings(points: list[dict], first: list[dict]) -> list[str]:
    """Where `points` go below the curve `first` for good, over each axis that both have, as texts."""
    texts = {'tokens': ('', '{:,.0f} tokens'), 'minutes': ('by time ', '{:.1f} minutes'),
             'gpu_hours': ('by GPUs ', '{:,.1f} GPU-hours'), 'flops': ('by compute ', '{:.3g} FLOPs')}
    found = []
    for axis, (by, amount) in texts.items():
        if points[-1][axis] is not None and first[-1][axis] is not None:
            where = crossing(points, first, axis)
            found.append(f'{by}from {"no point" if where is None else amount.format(where)} on')
    return found


# ---- the picture ----

def axes_of(curves: list[list[dict]]) -> list[str]:
    """What a loss is drawn over, of AXES: tokens, GPU-hours or else minutes, and FLOPs if they are known."""
    known = [axis for axis in AXES if all(points[-1][axis] is not None for points in curves)]
    return [axis for axis in known if axis != 'minutes' or 'gpu_hours' not in known]


def plot(curves: dict[str, list[dict]]):
    styles = figures.line_styles(len(curves))
    drawn_over = axes_of(list(curves.values()))
    figure, panels = figures.new_figure(1, len(drawn_over), figsize=(5.5 * len(drawn_over), 5))
    for axes, axis in zip(panels, drawn_over):
        for (label, points), style in zip(curves.items(), styles):
            marker = 'o' if len(points) <= 40 else None
            x = [p[axis] for p in points]
            figures.draw_band(axes, x, points, label=label, marker=marker, markersize=3, **style)
        set_axes(axes, list(curves.values()), f'{AXES[axis]} of training')
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
    return figure


def set_axes(axes, curves: list[list[dict]], xlabel: str) -> None:
    """Numbers the x axis as 2 M, 20 G; shows of each curve's losses all but its first quarter."""
    from matplotlib.ticker import EngFormatter
    lowest = min(p['lowest'] for points in curves for p in points)
    highest = max(p['highest'] for points in curves for p in points[len(points) // 4:])
    margin = max(0.04 * (highest - lowest), 1e-3)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set(xlabel=xlabel, xlim=(0, None), ylabel='validation loss, nats per token',
             ylim=(lowest - margin, highest + margin))


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = figures.runs_to_read('loss_curves RUN RUN ... --out=NAME', Settings, argv)
        curves = figures.curves_of(runs, figures.curve)
        first = next(iter(curves.values()))
        for label, points in curves.items():
            end = points[-1]
            print(f'{label}: {end["mean"]:.4f} ({end["lowest"]:.4f} to {end["highest"]:.4f}, seeds: {end["seeds"]}) '
                  f'after {end["tokens"]:,} tokens, {end["minutes"]:.1f} minutes')
            if points is not first:
                print(f'  below the first line {", ".join(crossings(points, first))}')
        rows = [{'label': label} | p for label, points in curves.items() for p in points]
        figures.write_figure(s.out, runs, 'loss_curves', rows, plot(curves))


if __name__ == '__main__':
    main()
