"""What the scripts of figures and tables share: their command line, files, intervals and plots."""
import csv
import inspect
import io
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from analysis.runs import Run, group_by, map_readable
from lm_architectures.files import UserError, friendly_errors, write_file
from lm_architectures.machine.devices import Device, pick_device, pick_dtype
from lm_architectures.run.folders import load_run, run_data
from lm_architectures.run.models import add_file
from lm_architectures.settings import check_ranges, load_settings

BAND = 'Line: mean over seeds\nBand: lowest to highest seed'  # legend title of `draw` with bands


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without extension; None: the script's name, beside the runs
    model: str | None = None  # path of the model's file, if it is not in this repository
    labels: str | None = None  # 'A,B': names of the groups of runs, as they come; None: the settings that differ
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now

    def __post_init__(self):
        """Raise UserError for a whole number below 1: all of them are counts and sizes."""
        check_ranges(self, **{name: 1 for name, value in vars(self).items() if type(value) is int})


@dataclass
class ModelSettings(Settings):
    data: str | None = None  # data folder or task; None: the runs' own data
    device: Device = 'auto'  # auto (cuda if there is a GPU), cuda, cpu or mps


def script(Settings: type) -> Callable:
    """Turn a function (runs, settings) into the `main` of a script: a decorator.

    The script reads the runs of its command line and writes what the function returns, {ending:
    content} as in `write`. Files are named --out or, beside the first run, like the script. Runs
    that cannot be read are left out.
    """
    def decorator(analyze):
        def main(argv: list[str] | None = None) -> None:
            with friendly_errors(argv):
                s, folders, _ = load_settings(Settings, argv)
                name = Path(inspect.getfile(analyze)).stem
                if not folders:
                    raise UserError(f'which runs? python -m analysis.{name} RUN RUN ... --out=NAME')
                if s.model:
                    add_file(s.model)
                runs = list(map_readable(folders, lambda folder: Run(folder, s.code)).values())
                path = Path(os.path.abspath(folders[0])).parent / name
                if s.out:
                    path = Path(s.out.removesuffix('.png').removesuffix('.csv'))
                write(path, analyze(runs, s))
        return main
    return decorator


# ---- models of runs ----

def load(run: Run, s: ModelSettings) -> tuple:
    """Load a run on s.device: (model, data). s.data overrides the run's data."""
    model, _ = load_run(run.folder, pick_device(s.device), code=run.code)
    return model, run_data(run.record, s.data, run.folder)


def require(model, run: Run, *methods: str) -> None:
    """Raise UserError unless the model of a run has these methods."""
    if missing := [name for name in methods if not hasattr(model, name)]:
        raise UserError(f'{run} cannot be analyzed: {type(model).__module__} has no {missing[0]} (needed: '
                        f'{", ".join(methods)})')


def autocast(dtype: str, device: torch.device):
    """Return an autocast context for a dtype: float32 (no autocast), bfloat16 or auto."""
    picked = pick_dtype(dtype, device.type)
    return torch.autocast(device.type, picked, enabled=picked != torch.float32)


# ---- intervals ----

def mean_and_interval(values: Sequence[float], *names: str) -> dict[str, float | None]:
    """Return {'mean', 'low', 'high'}: the mean and its 95% interval by Student's t.

    The ends are None if all values are equal. names: others for these three.
    """
    mean, ends = statistics.mean(values), (None, None)
    if len(set(values)) > 1:
        from scipy import stats
        ends = stats.t.interval(0.95, len(values) - 1, mean, stats.sem(values))
    return dict(zip(names or ('mean', 'low', 'high'), (mean, *ends)))


def paired_gaps(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return a - b for each seed. If b is a single number, it is subtracted from all."""
    return [x - y for x, y in zip(a, b * len(a) if len(b) == 1 else b, strict=True)]


def interval_text(low: float | None, high: float | None, sign: str = '') -> str:
    """Format an interval, '' if it is None. sign: '+' for differences."""
    return '' if low is None else f'{low:{sign}.4f} to {high:{sign}.4f}'


# ---- files ----

def write(path, contents: dict) -> None:
    """Write {ending: content} to path + ending, and print the paths.

    content: rows of a CSV file, the text of another file, or a figure.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for ending, content in contents.items():
        if isinstance(content, list):
            write_csv(f'{path}{ending}', content)
        elif isinstance(content, str):
            write_file(f'{path}{ending}', content.encode(errors='replace'))
        else:
            png = io.BytesIO()
            content.savefig(png, dpi=200)
            write_file(f'{path}{ending}', png.getvalue())
    if contents:
        print('written to ' + ', '.join(f'{path}{ending}' for ending in contents))


def read_csv(path) -> list[dict[str, str]]:
    """Read the rows of a CSV file as dicts of strings."""
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def write_csv(path, rows: list[dict]) -> None:
    """Write rows (dicts) as a CSV file with a header. Cells that a row lacks are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row))
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode(errors='replace'))


def show(rows: list[dict], *columns: str) -> None:
    """Print a table of these columns of rows (dicts), of all columns if none are named."""
    import pandas as pd
    table = pd.DataFrame(rows, columns=list(columns) or None, dtype=object).fillna('')
    print(table.to_string(index=False, float_format='{:.5g}'.format))


def markdown_table(rows: list[dict]) -> str:
    """Format rows (dicts) as a Markdown table. Cells that a row lacks are empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([str(row.get(name, '')) for name in columns] for row in rows)]
    head, *body = ['| ' + ' | '.join(line) + ' |' for line in cells]
    return '\n'.join([head, '|' + '---|' * len(columns), *body])


# ---- rows with labels ----

def labeled(curves: dict[str, list[dict]]) -> list[dict]:
    """Return the rows of {label: rows}, each with its label."""
    return [{'label': label} | row for label, rows in curves.items() for row in rows]


def by_label(rows: list[dict]) -> dict[str, list[dict]]:
    """Group rows by their label: {label: rows}."""
    return group_by(rows, lambda row: row['label'])


# ---- plots ----

def new_figure(title: str, n: int = 1, size: tuple = (8.5, 4.5), columns: int = 4, **kwargs) -> tuple:
    """Return (figure, n axes of this size in inches), at most `columns` in a row. Needs no display.

    kwargs: of Figure.subplots.
    """
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update({'axes.grid': True, 'grid.alpha': 0.3, 'axes.titlesize': 'medium',
                                'axes.formatter.min_exponent': 5,  # log axes: 0.01 and 100, not powers of ten
                                'xtick.labelsize': 'small', 'ytick.labelsize': 'small',
                                'legend.frameon': False, 'legend.title_fontsize': 'small'})
    columns, (width, height) = min(columns, n), size
    rows = -(-n // columns)
    figure = Figure((width * columns, height * rows), layout='constrained')
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    for unused in axes.flat[n:]:
        unused.set_axis_off()
    return figure, axes.flat[:n]


def styles(labels) -> dict[str, dict]:
    """Return {label: {'color', 'linestyle'}}, 40 distinct styles."""
    return {label: {'color': f'C{i % 10}', 'linestyle': ('-', '--', ':', '-.')[i // 10 % 4]}
            for i, label in enumerate(dict.fromkeys(labels))}


def draw(axes, rows: list[dict], x: str, y: str = 'mean', style_of: dict | None = None, **style) -> None:
    """Draw column y over column x, a line for each label. Means get a band from lowest to highest.

    Rows without y are left out. style_of: from `styles`, to share styles between axes.
    """
    style_of = style_of or styles(row['label'] for row in rows)
    for label, own in by_label(rows).items():
        known = [row for row in own if row[y] is not None]
        places = [row[x] for row in known]
        look = {'marker': 'o' if len(known) <= 40 else None, 'markersize': 3, 'label': label, **style_of[label]}
        axes.plot(places, [row[y] for row in known], **look | style)
        if y == 'mean':
            axes.fill_between(places, [row['lowest'] for row in known], [row['highest'] for row in known], alpha=0.2,
                              color=look['color'], linewidth=0)


def add_legend(figure, title: str, place: str = 'right center', ncols: int = 1) -> None:
    """Add a legend outside the axes, with every label once."""
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(lines.values(), lines, loc=f'outside {place}', title=title, ncols=ncols)


def smoothed(values, length: int):
    """Smooth values (n,) by a Savitzky-Golay filter of order 2 over `length` points, at most n."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
