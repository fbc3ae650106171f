"""Final validation loss over the attention window: figure 4 of the SPS paper.

    python -m analysis.window_sweep RUN RUN ... --out=NAME

Runs that differ only in `window` and the seed form a line. Models with a single window, such as
Standard, are drawn as a horizontal line. Writes NAME.png and NAME.csv.
"""
from math import inf

from analysis import figures
from analysis.runs import curves_of, finished, map_readable, spread


def sweep(runs: list) -> list[dict]:
    """Return {'window', **spread of final losses} per window, ascending; inf: no window."""
    by_window = {}
    for run in runs:
        window = getattr(run.config, 'window', None)
        by_window.setdefault(inf if window is None else window, []).append(run)
    found = map_readable(sorted(by_window), lambda window: finished(by_window[window]))
    return [{'window': window} | spread([run.final_loss() for run in of_window]) for window, of_window in found.items()]


def window_name(window: float) -> str:
    return 'all' if window == inf else str(window)


def plot(lines: dict[str, list[dict]]):
    """Draw {label: points} with evenly spaced windows."""
    swept = {label: points for label, points in lines.items() if len(points) > 1} or lines
    windows = sorted({p['window'] for points in swept.values() for p in points})
    figure, (axes,) = figures.new_figure('Final validation loss by attention window')
    style_of = figures.styles(lines)
    rows = [row | {'place': windows.index(row['window'])} for row in figures.labeled(swept)]
    figures.draw(axes, rows, 'place', style_of=style_of)
    for label in [label for label in lines if label not in swept]:  # a single window: a horizontal line
        point, = lines[label]
        axes.axhspan(point['lowest'], point['highest'], alpha=0.2, color=style_of[label]['color'], linewidth=0)
        axes.axhline(point['mean'], label=label, **style_of[label])
    axes.set_xticks(range(len(windows)), map(window_name, windows))
    axes.set(xlabel='attention window w, tokens', ylabel='final validation loss, nats per token')
    figures.add_legend(figure, figures.BAND)
    return figure


@figures.script(figures.Settings)
def main(runs: list, s: figures.Settings) -> dict:
    lines = curves_of(runs, sweep, {'window'}, s.labels)
    rows = [row | {'window': window_name(row['window'])} for row in figures.labeled(lines)]
    figures.show(rows)
    return {'.csv': rows, '.png': plot(lines)}


if __name__ == '__main__':
    main()
