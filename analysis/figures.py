"""What the figures share: where they are written, how they look."""
import csv
import io
import os
from math import inf
from pathlib import Path

from common.files import ROOT, write_file


def output_path(out: str | None, runs: list[str], name: str) -> Path:
    """Where to write what is drawn from the runs, without ending: `out`, or else `name` in the folder of the first run.

    A run in the repository's root takes it into its own folder, so that the root stays clean. Folders are made.
    """
    if out is None:
        run = Path(os.path.abspath(runs[0]))
        folder = run if run.parent == ROOT else run.parent
        path = (folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder) / name
    elif out.endswith(os.sep) or Path(out).is_dir():
        path = Path(out) / name
    else:
        path = Path(out.removesuffix('.png').removesuffix('.csv').removesuffix('.html'))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_csv(path, rows: list[dict]) -> None:
    """Writes rows, dicts with the same keys."""
    text = io.StringIO(newline='')
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode(errors='replace'))


def new_figure(*args, **kwargs) -> tuple:
    """matplotlib's (figure, axes) of subplots(*args, **kwargs), drawn without a display."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    return plt.subplots(*args, layout='constrained', **kwargs)


def line_styles(n: int) -> list[dict]:
    """n colours and line styles, all different up to 40."""
    return [{'color': f'C{i % 10}', 'linestyle': ('-', '--', ':', '-.')[i // 10 % 4]} for i in range(n)]


def draw_band(axes, x: list, points: list[dict], **style):
    """A line of the points' 'mean' over x, in a band from 'lowest' to 'highest' of the seeds. Returns the line."""
    line, = axes.plot(x, [p['mean'] for p in points], **style)
    axes.fill_between(x, [p['lowest'] for p in points], [p['highest'] for p in points], alpha=0.2,
                      color=line.get_color(), linewidth=0)
    return line


def number_log_axis(axis, lowest: float, highest: float) -> None:
    """Numbers on a log axis from lowest to highest. matplotlib's own are powers of ten, and there may be none."""
    from matplotlib import ticker
    axis.set_major_locator(ticker.MaxNLocator(6) if highest < 10 * lowest else ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f'{x:g}'))
    axis.set_minor_locator(ticker.NullLocator())


def save_figure(figure, path) -> None:
    """Writes a figure as PNG, and closes it."""
    import matplotlib.pyplot as plt
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format='png')
    plt.close(figure)
    write_file(path, image.getvalue())


def is_number(value) -> bool:
    """Whether a logged value can be drawn: logs may be damaged, or be of older code."""
    return isinstance(value, (int, float)) and abs(value) < inf


def smoothed(values, length: int):
    """The trend of values (n,): a Savitzky-Golay filter of order 2 over `length` points, or all if fewer. (n,)."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
