"""What the papers' analyses share: models of runs, validation texts, and plots of lines."""
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from analysis.figures import Settings, add_legend, draw, new_figure
from analysis.runs import usable
from lm_architectures.data.text.shards import Data
from lm_architectures.files import UserError, warn_once
from lm_architectures.machine.devices import Device, pick_device, pick_dtype
from lm_architectures.run.folders import load_run, run_data


@dataclass
class ModelSettings(Settings):
    data: str | None = None  # data folder or task; None: the runs' own data
    device: Device = 'auto'  # auto (cuda if there is a GPU), cuda, cpu or mps


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
    n = min(data.n_rows('val', T), max(1, n_tokens // T))
    for start in range(0, n, batch_size):
        idx, targets = data.val_batch(range(start, min(n, start + batch_size)), T)
        yield idx.to(device), targets.to(device)


def autocast(dtype: str, device: torch.device):
    """Return an autocast context for a dtype: float32 (no autocast), bfloat16 or auto."""
    picked = pick_dtype(dtype, device.type, bf16_on_cpu=True)
    return torch.autocast(device.type, picked, enabled=picked != torch.float32)


def long_documents(data, least: int, most: int, n: int, seed: int | None = None) -> list:
    """Return n validation documents (int64 arrays) of at least `least` tokens, truncated to `most`.

    Both lengths include eos. The documents are the first ones, or a random sample if `seed` is
    given. Warns if there are fewer than n, raises UserError if there are none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} has no documents of its own: give --data=FOLDER with text documents')
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


# ---- plots ----

def line_figure(title: str, rows: pd.DataFrame, x: str, lines: dict[str, dict], legend: str,
                style_of: dict | None = None, **labels) -> tuple:
    """Return (figure, its axes) with columns over column x. lines: {column: its style}."""
    figure, (axes,) = new_figure(title)
    for y, style in lines.items():
        draw(axes, rows, x, y, style_of=style_of, **style)
    axes.set(**labels)
    add_legend(figure, legend)
    return figure, axes


def smoothed(values, length: int):
    """Smooth values (n,) by a Savitzky-Golay filter of order 2 over `length` points, at most n."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
