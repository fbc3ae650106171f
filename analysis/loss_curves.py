"""Validation loss against training tokens, time and FLOPs, runs that differ only in the seed averaged.

    python -m analysis.loss_curves RUN RUN ... --out=NAME

Writes NAME.png (a line per configuration, a band from the lowest to the highest seed) and NAME.csv, and prints where
each line goes below the first one's for good, as figure 2 of the SPS paper does. Time is that of the runs' own logs:
compare runs that had the same machine. Where all runs were on GPUs it is GPU-hours, wall time times the GPUs that the
run began with. FLOPs are the model's `flops_per_token`. A run that cannot be drawn is left out, and named.

The picture begins where the steep start is over, after a quarter of each line, so that the ends can be told apart; the
CSV has all of it.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

from dataclasses import dataclass

import numpy as np

from analysis.figures import (
    curve,
    curves_of,
    draw_band,
    line_styles,
    new_figure,
    number_log_axis,
    runs_to_read,
    write_figure,
)
from common.files import friendly_errors

TOKENS = (1, 'tokens'), (1e3, 'thousand tokens'), (1e6, 'million tokens'), (1e9, 'billion tokens')
MINUTES = (1, 'minutes'), (60, 'hours'), (60 * 24, 'days')
GPU_HOURS = (1, 'GPU-hours'), (1e3, 'thousand GPU-hours')
FLOPS = tuple((10.0 ** power, f'1e{power} FLOPs') for power in range(0, 31, 3))


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

def loss_limits(curves: list[list[dict]]) -> tuple[float, float]:
    """(lowest, highest) loss to show: of each curve all but its first quarter, so that none is out of sight."""
    lowest = min(p['lowest'] for points in curves for p in points)
    highest = max(p['highest'] for points in curves for p in points[len(points) // 4:])
    return lowest, max(highest, lowest + 1e-3)


def unit_for(largest: float, units: tuple) -> tuple[float, str]:
    """The largest of the units (size, name) that goes into `largest` twice, or the first."""
    return next((unit for unit in reversed(units) if largest >= 2 * unit[0]), units[0])


def axes_of(curves: list[list[dict]]) -> dict[str, tuple[float, str]]:
    """{what a loss is drawn over: (size of its unit, name)}: tokens, GPU-hours or else time, and FLOPs if known."""
    def largest(axis):
        values = [points[-1][axis] for points in curves]
        return None if None in values else max(values)
    has_gpus, has_flops = largest('gpu_hours') is not None, largest('flops') is not None
    units = {'tokens': TOKENS} | ({'gpu_hours': GPU_HOURS} if has_gpus else {'minutes': MINUTES})
    units |= {'flops': FLOPS} if has_flops else {}
    return {axis: unit_for(largest(axis), sizes) for axis, sizes in units.items()}


def plot(curves: dict[str, list[dict]]):
    styles = line_styles(len(curves))
    columns = max(1, min(3, len(curves), 130 // (max(map(len, curves)) + 8)))
    rows = -(-len(curves) // columns)
    units = axes_of(list(curves.values()))
    figure, panels = new_figure(1, len(units), figsize=(5.5 * len(units), 4.5 + 0.2 * rows))
    lowest, highest = loss_limits(list(curves.values()))
    for axes, (axis, (unit, name)) in zip(panels, units.items()):
        for (label, points), style in zip(curves.items(), styles):
            x = [p[axis] / unit for p in points]
            marker = 'o' if len(points) <= 40 else None
            draw_band(axes, x, points, label=label, marker=marker, markersize=3, **style)
        set_loss_axis(axes, lowest, highest)
        axes.set(xlabel=f'{name} of training', xlim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=columns)
    return figure


def set_loss_axis(axes, lowest: float, highest: float) -> None:
    """Shows losses from lowest to highest, in logarithms where one is far above the other."""
    margin = 0.04 * (highest - lowest)
    if 0 < 10 * lowest < highest:
        axes.set(yscale='log', ylim=(lowest / 1.1, highest * 1.1))
        number_log_axis(axes.yaxis, lowest, highest)
    else:
        axes.set(ylim=(lowest - margin, highest + margin))
    axes.set(ylabel='validation loss, nats per token')


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('loss_curves RUN RUN ... --out=NAME', Settings, argv)
        curves = curves_of(runs, curve)
        first = next(iter(curves.values()))
        for label, points in curves.items():
            end = points[-1]
            print(f'{label}: {end["mean"]:.4f} ({end["lowest"]:.4f} to {end["highest"]:.4f}, seeds: {end["seeds"]}) '
                  f'after {end["tokens"]:,} tokens, {end["minutes"]:.1f} minutes')
            if points is not first:
                print(f'  below the first line {", ".join(crossings(points, first))}')
        rows = [{'label': label} | p for label, points in curves.items() for p in points]
        write_figure(s.out, runs, 'loss_curves', rows, plot(curves))


if __name__ == '__main__':
    main()
