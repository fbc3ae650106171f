"""What the figures share: their command line, files and plots."""
import inspect
import io
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from analysis.runs import read_runs, usable
from lm_architectures.data.text.shards import Data
from lm_architectures.files import ROOT, UserError, friendly_errors, warn_once, write_file
from lm_architectures.machine.devices import Device, pick_device, pick_dtype
from lm_architectures.run.folders import load_run, run_data
from lm_architectures.run.models import add_file
from lm_architectures.run.run_settings import check_windows
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


# ---- models of runs ----

def load(folder: str, s: ModelSettings, *methods: str) -> tuple:
    """Load a run on s.device: (model, data, record). s.data overrides the run's data.

    methods: what the analysis needs of the model. UserError if one is missing.
    """
    model, record = load_run(folder, pick_device(s.device), code=s.code)
    if missing := [name for name in methods if not hasattr(model, name)]:
        raise UserError(f'{folder} cannot be analyzed: model_{record["model"]} has no {missing[0]} (needed: '
                        f'{", ".join(methods)})')
    return model, run_data(record, s.data, folder), record


def measured(runs: pd.DataFrame, measure: Callable, *args) -> pd.DataFrame:
    """Return the rows of measure(folder, *args) of each run, after the run's label and folder.

    Runs for which it raises UserError are left out and named.
    """
    found = dict(usable(runs.itertuples(), lambda run: (
        (run.label, run.folder), pd.DataFrame(measure(run.folder, *args), dtype=object))))
    rows = pd.concat(found, names=['label', 'run', None]).reset_index(['label', 'run'])
    return rows.reset_index(drop=True).infer_objects()


def val_windows(data, T: int, n_tokens: int, batch_size: int, device) -> Iterator[tuple]:
    """Yield (idx, targets) (B, T) of the first validation windows with about n_tokens in total."""
    check_windows(data, T)
    n = min(data.n_rows('val', T), max(1, n_tokens // T))
    for start in range(0, n, batch_size):
        idx, targets = data.val_batch(range(start, min(n, start + batch_size)), T)
        yield idx.to(device), targets.to(device)


def autocast(dtype: str, device: torch.device):
    """Return an autocast context for a dtype: float32 (no autocast), bfloat16 or auto."""
    picked = pick_dtype(dtype, device.type)
    return torch.autocast(device.type, picked, enabled=picked != torch.float32)


def long_documents(data, least: int, most: int, n: int, seed: int | None = None) -> list:
    """Return n validation documents (int64 arrays) of at least `least` tokens, truncated to `most`.

    Both lengths include eos. The documents are the first ones, or a random sample if `seed` is
    given. Warns if there are fewer than n, raises UserError if there are none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task and has no documents: give --data=FOLDER with text documents')
    ids = data.tokens('val', 0, data.splits['val']['tokens'])
    *documents, _ = np.split(ids, np.flatnonzero(ids == data.eos_id) + 1)  # each with its eos
    found = [document[:most] for document in documents if len(document) >= least]
    if not found:
        raise UserError(f'{data.folder} has no validation document of {least:,} tokens or more: give shorter lengths, '
                        'or --data=FOLDER with longer documents')
    if seed is not None:
        random.Random(seed).shuffle(found)
    if len(found) < n:
        warn_once(f'{data.folder} has {len(found):,} validation documents of at least {least:,} tokens, not {n:,}')
    return found[:n]


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


def line_figure(title: str, rows: pd.DataFrame, x: str, lines: dict[str, dict], legend: str,
                style_of: dict | None = None, **labels) -> tuple:
    """Return (figure, its axes) with columns over column x. lines: {column: its style}."""
    figure, (axes,) = new_figure(title)
    for y, style in lines.items():
        draw(axes, rows, x, y, style_of=style_of, **style)
    axes.set(**labels)
    add_legend(figure, legend)
    return figure, axes


def add_legend(figure, title: str, place: str = 'right center', ncols: int = 1) -> None:
    """Add a legend outside the axes, with every label once."""
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(lines.values(), lines, loc=f'outside {place}', title=title, ncols=ncols)


def smoothed(values, length: int):
    """Smooth values (n,) by a Savitzky-Golay filter of order 2 over `length` points, at most n."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
