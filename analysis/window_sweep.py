"""Final validation loss over the attention window: figure 4 of the SPS paper.

    python -m analysis.window_sweep RUN RUN ... --out=NAME

Runs that differ only in `window` and the seed form a line. Models with a single window, such as
Standard, are drawn as a horizontal line. Writes NAME.png and NAME.csv.
"""
from math import inf

from analysis import figures
from common.models import saved_config
from common.runs import read_run


class Settings(figures.Settings):
    """Only the common settings."""


def sweep(runs: list[str]) -> list[dict]:
    """Return {'window', **spread of final losses} per window, ascending; inf: no window."""
    by_window = {}
    for run in runs:
        window = getattr(saved_config(read_run(run), run), 'window', None)
        by_window.setdefault(inf if window is None else window, []).append(run)
    found = figures.map_readable(sorted(by_window), lambda window: figures.final_losses(by_window[window]))
    return [{'window': window} | figures.spread(losses) for window, losses in found.items()]


def window_name(window: float) -> str:
    return 'all' if window == inf else str(window)


def plot(lines: dict[str, list[dict]]):
    """Draw {label: points} with evenly spaced windows."""
    swept = [points for points in lines.values() if len(points) > 1] or list(lines.values())
    windows = sorted({p['window'] for points in swept for p in points})
    figure, axes = figures.new_figure('Final validation loss by attention window', figsize=(8, 4.5))
    for label, points, style in figures.styled(lines):
        if points in swept:
            figures.draw_band(axes, [windows.index(p['window']) for p in points], points, label=label, **style)
        else:  # a single window: a horizontal line
            axes.axhspan(points[0]['lowest'], points[0]['highest'], alpha=0.2, color=style['color'], linewidth=0)
            axes.axhline(points[0]['mean'], label=label, **style)
    axes.set_xticks(range(len(windows)), map(window_name, windows))
    axes.set(xlabel='attention window w, tokens', ylabel='final validation loss, nats per token')
    figure.legend(loc='outside right center', title=figures.BAND)
    return figure


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('window_sweep RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        lines = figures.curves_of(runs, sweep, {'window'}, s.labels)
        for label, points in lines.items():
            print(f'{label}: ' + ', '.join(f'{p["mean"]:.4f} at w = {window_name(p["window"])}' for p in points))
        rows = [{'label': label} | p | {'window': window_name(p['window'])}
                for label, points in lines.items() for p in points]
        figures.write_figure(s.out, runs, 'window_sweep', rows, plot(lines))


if __name__ == '__main__':
    main()
