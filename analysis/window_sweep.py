"""Final validation loss over the window, for runs that differ in it: figure 4 of the SPS paper.

    python -m analysis.window_sweep RUN RUN ... --out=NAME

Runs that differ in nothing but `window` and the seed make a line, with bars from the lowest to the highest seed. Runs
of one window alone, as of Standard, are drawn straight across. Writes NAME.png and NAME.csv.
"""
import statistics
from dataclasses import dataclass

from analysis.figures import curves_of, final_losses, line_styles, new_figure, runs_to_read, write_figure
from common.files import friendly_errors
from common.runs import read_run, saved_config


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: window_sweep beside the runs


def sweep(runs: list[str]) -> list[dict]:
    """Points {'window', 'mean', 'lowest', 'highest', 'seeds'} of a group, from the smallest window to None (all)."""
    by_window = {}
    for run in runs:
        window = getattr(saved_config(read_run(run), run), 'window', None)
        by_window.setdefault(window, []).append(run)
    points = []
    for window in sorted(by_window, key=window_order):
        losses = final_losses(by_window[window])
        points.append({'window': window, 'mean': statistics.mean(losses), 'lowest': min(losses),
                       'highest': max(losses), 'seeds': len(losses)})
    return points


def window_order(window: int | None) -> float:
    return float('inf') if window is None else window


def window_name(window: int | None) -> str:
    return 'all' if window is None else str(window)


def plot(lines: dict[str, list[dict]]):
    """lines {label: points}. Windows stand side by side in equal steps, as they are often powers of a number and 0."""
    swept = [points for points in lines.values() if len(points) > 1] or list(lines.values())
    windows = sorted({p['window'] for points in swept for p in points}, key=window_order)
    place = {window: i for i, window in enumerate(windows)}
    figure, axes = new_figure(figsize=(7.5, 4.5))
    drawn = []
    for points, style in zip(lines.values(), line_styles(len(lines))):
        if points not in swept:
            p, = points
            drawn.append(axes.axhline(p['mean'], color=style['color'], linestyle='--'))
            axes.axhspan(p['lowest'], p['highest'], color=style['color'], alpha=0.15, linewidth=0)
            continue
        spread = [[p['mean'] - p['lowest'] for p in points], [p['highest'] - p['mean'] for p in points]]
        drawn.append(axes.errorbar([place[p['window']] for p in points], [p['mean'] for p in points], spread,
                                   marker='o', capsize=4, **style))
    axes.set_xticks(range(len(windows)), map(window_name, windows))
    axes.set(xlabel='window w, tokens', ylabel='final validation loss, nats per token')
    figure.legend(drawn, lines, loc='outside right upper')
    return figure


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('window_sweep RUN RUN ... --out=NAME', Settings, argv)
        lines = curves_of(runs, sweep, besides={'window'})
        for label, points in lines.items():
            best, worst = (choose(points, key=lambda p: p['mean']) for choose in (min, max))
            print(f'{label}: ' + ', '.join(f'{p["mean"]:.4f} at w = {window_name(p["window"])}' for p in points))
            if len(points) > 1:
                print(f'  best at w = {window_name(best["window"])}, by {worst["mean"] - best["mean"]:.4f}')
        rows = [{'label': label} | p | {'window': window_name(p['window'])}
                for label, points in lines.items() for p in points]
        write_figure(s.out, runs, 'window_sweep', rows, plot(lines))


if __name__ == '__main__':
    main()
