"""Final validation loss over the attention window: figure 4 of the SPS paper.

    python -m analysis.window_sweep RUN RUN ... --out=NAME

Runs that differ only in `window` and the seed form a line. Models with a single window, such as
Standard, are drawn as a horizontal line. Writes NAME.png and NAME.csv.
"""
from analysis import figures
from analysis.runs import curves_of, finished, group_by, map_readable, spread


def sweep(runs: list) -> list[dict]:
    """Return {'window', **spread of final losses} per window, ascending; 'all': no window."""
    by_window = group_by(runs, lambda run: getattr(run.config, 'window', None))
    found = map_readable(by_window, lambda window: finished(by_window[window]))
    return sorted([{'window': 'all' if window is None else str(window)} | spread([run.final_loss() for run in own])
                   for window, own in found.items()], key=in_order)


def in_order(point: dict) -> float:
    return float(point['window'].replace('all', 'inf'))


def plot(lines: dict[str, list[dict]]):
    """Draw {label: points} with evenly spaced windows."""
    swept = {label: points for label, points in lines.items() if len(points) > 1} or lines
    figure, (axes,) = figures.new_figure('Final validation loss by attention window')
    axes.xaxis.update_units([point['window'] for point in sorted(sum(swept.values(), []), key=in_order)])
    style_of = figures.styles(lines)
    figures.draw(axes, figures.labeled(swept), 'window', style_of=style_of)
    for label in [label for label in lines if label not in swept]:  # a single window: a horizontal line
        point, = lines[label]
        axes.axhspan(point['lowest'], point['highest'], alpha=0.2, color=style_of[label]['color'], linewidth=0)
        axes.axhline(point['mean'], label=label, **style_of[label])
    axes.set(xlabel='attention window w, tokens', ylabel='final validation loss, nats per token')
    figures.add_legend(figure, figures.BAND)
    return figure


@figures.script(figures.Settings)
def main(runs: list, s: figures.Settings) -> dict:
    lines = curves_of(runs, sweep, {'window'}, s.labels)
    rows = figures.labeled(lines)
    figures.show(rows)
    return {'.csv': rows, '.png': plot(lines)}


if __name__ == '__main__':
    main()
