"""What the figures share: their command line, files and plots."""
import inspect
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from analysis.runs import read_runs
from lm_architectures.files import ROOT, UserError, friendly_errors, write_file
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


def script(Settings: type, command: str | None = None) -> Callable:
    """Turn a function (table of runs, settings) into the `main` of a script: a decorator.

    The runs are those of the command line, without labels. The script writes what the function
    returns, {ending: content} as in `write`, to files named --out or, beside the first run, like
    the command. command: None for the function's module.
    """
    def decorator(analyze):
        file = Path(inspect.getfile(analyze)).relative_to(ROOT)
        name = command or '.'.join(file.with_suffix('').parts)

        def main(argv: list[str] | None = None) -> None:
            with friendly_errors(argv):
                s, folders, _ = load_settings(Settings, argv)
                if not folders:
                    raise UserError(f'which runs? python -m {name} RUN RUN ... --out=NAME')
                if s.model:
                    add_file(s.model)
                beside = Path(os.path.abspath(folders[0])).parent / re.split('[. ]', name)[-1]
                write(s.out or beside, analyze(read_runs(folders, s.code), s))
        return main
    return decorator


# ---- files ----

def write(path, contents: dict) -> None:
    """Write {ending: a table, a text or a figure} to path + ending, and print the paths."""
    path = str(path).removesuffix('.png').removesuffix('.csv')
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for ending, content in contents.items():
        if isinstance(content, pd.DataFrame):
            content = content.to_csv(index=False)
        if isinstance(content, str):
            written = content.encode(errors='replace')
        else:
            content.savefig(png := io.BytesIO(), dpi=200)
            written = png.getvalue()
        write_file(f'{path}{ending}', written)
    if contents:
        print('written to ' + ', '.join(f'{path}{ending}' for ending in contents))


def show(rows, *columns: str) -> None:
    """Print a table of these columns, of all columns if none are named."""
    table = pd.DataFrame(rows, columns=list(columns) or None, dtype=object)
    print(table.where(table.notna(), '').to_string(index=False, float_format='{:.5g}'.format))


def markdown(table: pd.DataFrame) -> str:
    """Format a table of texts in Markdown."""
    head, *body = ['| ' + ' | '.join(map(str, cells)) + ' |' for cells in (table.columns, *table.to_numpy())]
    return '\n'.join([head, '|' + '---|' * len(table.columns), *body])


def gap_text(mean, low, high) -> str:
    """Format a difference and its interval: '+0.037 (+0.005 to +0.069)'."""
    return f'{mean:+.3f}' + (f' ({low:+.3f} to {high:+.3f})' if low == low else '')


# ---- plots ----

def new_figure(title: str, n: int = 1, size: tuple = (8.5, 4.5)) -> tuple:
    """Return (figure, n axes of this size in inches), at most 4 in a row. Needs no display."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update({'axes.grid': True, 'grid.alpha': 0.3, 'axes.titlesize': 'medium',
                                'axes.formatter.min_exponent': 5,  # log axes: 0.01 and 100, not powers of ten
                                'xtick.labelsize': 'small', 'ytick.labelsize': 'small',
                                'legend.frameon': False, 'legend.title_fontsize': 'small'})
    columns, (width, height) = min(4, n), size
    rows = -(-n // columns)
    figure = Figure((width * columns, height * rows), layout='constrained')
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    for unused in axes.flat[n:]:
        unused.set_axis_off()
    return figure, axes.flat[:n]


def styles(labels) -> dict[str, dict]:
    """Return {label: {'color', 'linestyle'}}, 40 distinct styles."""
    return {label: {'color': f'C{i % 10}', 'linestyle': ('-', '--', ':', '-.')[i // 10 % 4]}
            for i, label in enumerate(dict.fromkeys(labels))}


def draw(axes, rows: pd.DataFrame, x: str, y: str = 'mean', style_of: dict | None = None, **style) -> None:
    """Draw column y over column x, a line for each label. Rows without y are left out.

    A mean has a band, from lowest to highest. style_of: from `styles`, to share styles.
    """
    style_of = style_of or styles(rows.label)
    for label, own in rows.dropna(subset=[y]).groupby('label', sort=False):
        look = {'marker': 'o' if len(own) <= 40 else None, 'markersize': 3, 'label': label, **style_of[label]}
        axes.plot(own[x], own[y], **look | style)
        if y == 'mean':
            axes.fill_between(own[x], own.lowest.astype(float), own.highest.astype(float), alpha=0.2, linewidth=0,
                              color=look['color'])


def add_legend(figure, title: str, place: str = 'right center', ncols: int = 1) -> None:
    """Add a legend outside the axes, with every label once."""
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(lines.values(), lines, loc=f'outside {place}', title=title, ncols=ncols)
