"""Shared code of the figures and tables: reading and grouping runs, statistics, plots."""
import csv
import io
import itertools
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from common.continuing import MAY_CHANGE, may_change
from common.files import UserError, command, friendly_errors, is_number, printable, read_lines, warn_once, write_file
from common.machine import Device, pick_device, pick_dtype
from common.models import add_file, count_parameters
from common.runs import load_run, meta_run, read_log, read_run, run_data
from common.settings import load_settings, make_settings
from data.shards import Data
from train import Settings as TrainSettings

# settings that are ignored when runs are grouped and labeled
IGNORED = MAY_CHANGE | {'seed', 'extend', 'model', 'method', 'vocab_size', 'n_ids', 'eos_id'}
SHORT = {'learning_rate': 'lr', 'max_tokens': 'tokens'}  # names in labels
SAME_SIZE = 1.1  # models within this ratio of parameter counts are the same size
BAND = 'Line: mean over seeds\nBand: lowest to highest seed'  # legend title of `draw_band`


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without extension; None: the script's name, beside the runs
    model: str | None = None  # path of the model's file, if it is not in this repository
    labels: str | None = None  # 'A,B': names of the groups of runs, as they come; None: the settings that differ


@dataclass
class CodeSettings(Settings):
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now


@dataclass
class ModelSettings(CodeSettings):
    data: str | None = None  # data folder or task; None: the runs' own data
    device: Device = 'auto'  # auto (cuda if there is a GPU), cuda, cpu or mps


# ---- one run ----

@contextmanager
def runs_to_read(usage: str, Settings: type, argv: list[str] | None) -> Iterator[tuple]:
    """Context manager: yield (settings, run folders) of a command line; print UserErrors.

    usage: module name and arguments, shown if no run is given.
    """
    with friendly_errors(argv):
        s, runs, _ = load_settings(Settings, argv)
        if not runs:
            raise UserError(f'which runs? python -m analysis.{usage}')
        if s.model:
            add_file(s.model)
        yield s, runs


def load_model_and_data(run: str, s) -> tuple:
    """Load a run on s.device: (model, config.json, data). s.data overrides the run's data."""
    model, record = load_run(run, pick_device(s.device), code=s.code, model=s.model)
    return model, record, run_data(record, s.data, run)


def require(model, run: str, *methods: str) -> None:
    """Raise UserError unless the model of a run has these methods."""
    if missing := [name for name in methods if not hasattr(model, name)]:
        raise UserError(f'{run} cannot be analyzed: {type(model).__module__} has no {missing[0]} (needed: '
                        f'{", ".join(methods)})')


def autocast(dtype: str, device: torch.device):
    """Return an autocast context for a dtype: float32 (no autocast), bfloat16 or auto."""
    picked = pick_dtype(dtype, device.type)
    return torch.autocast(device.type, picked, enabled=picked != torch.float32)


def model_name(record: dict) -> str:
    """Return the method of a run, or its model if it has none. record: the run's config.json."""
    model = str(record['model'])
    method = str(record['model_config'].get('method', model))
    return method if model in ('sps', method) else f'{model} {method}'  # such as a fork of model_sps


def settings_of(run: str) -> TrainSettings:
    """Return a run's training settings."""
    return make_settings(TrainSettings, read_run(run)['settings'], f'in {run}/config.json')


def n_parameters(run: str) -> int:
    """Return the number of parameters of a run's model. Tied weights count once."""
    return count_parameters(meta_run(run))


def final_loss(run: str) -> float:
    """Return a run's final validation loss in nats per token, or raise UserError if unfinished."""
    evaluated = [record for record in read_log(run) if is_number(record.get('val'))]
    if not evaluated:
        raise UserError(f'{run}: no validation loss was logged')
    tokens, planned = evaluated[-1]['tokens'], settings_of(run).max_tokens
    if tokens < planned:
        raise UserError(f'{run} was last evaluated at {tokens:,} of {planned:,} tokens: finish training it with '
                        + command('train.py', f'--out_dir={run}', '--resume'))
    return evaluated[-1]['val']


def flops_per_token(run: str) -> float | None:
    """Return the matmul FLOPs per training token, or None if the model cannot compute them."""
    record = read_run(run)
    try:
        return meta_run(run).flops_per_token(record['settings']['block_size'])
    except Exception:  # the model file was edited since, or has no flops_per_token
        return None


def evaluations(path: Path) -> dict[str, float]:
    """Read the latest scores of eval.jsonl as {'task metric': value}.

    Options that affect the score are appended to the key, and the step if training was unfinished.
    """
    def is_whole(record):
        parts = record.get('settings', {}), *record['results'].values()
        return (all(isinstance(part, dict) for part in parts) and is_number(record.get('step', 0))
                and is_number(record.get('of_steps') or 0))
    found = {}
    for record in read_lines(path, is_whole):
        affecting = ('data', 'val_tokens', 'num_fewshot', 'limit', 'bos', 'max_length')  # None or 0 by default
        options = [f'{key}={value}' for key, value in record.get('settings', {}).items()
                   if key in affecting and value not in (None, 0)]
        if record.get('step', 0) < (record.get('of_steps') or 0):
            options.append(f'step={record.get("step", 0)}')
        for task, metrics in record['results'].items():
            if task != 'speculative':  # speculative.csv has these
                found |= {' '.join([task, metric, *options]): value for metric, value in metrics.items()
                          if is_number(value)}
    return found


def logged(log: list[dict], key: str) -> list[float]:
    """Return all finite values of a key in a run's log."""
    return [record[key] for record in log if is_number(record.get(key))]


def median(log: list[dict], key: str) -> float | None:
    """Return the median of a logged value, or None if it was never logged."""
    values = logged(log, key)
    return statistics.median(values) if values else None


# ---- validation documents ----

def limited_block_size(runs: list[str], block_size: int) -> int:
    """Return block_size, limited to the shortest training window of the runs. Prints the limit."""
    shortest = min(read_run(run)['settings']['block_size'] for run in runs)
    if shortest < block_size:
        print(f'trained on windows of {shortest} tokens: only the first {shortest} of each document are read')
    return min(block_size, shortest)


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


# ---- groups of runs and their labels ----

def differences(runs: list[str], ignored: Set[str] = frozenset()) -> dict[str, dict]:
    """Return {run: {'model': model or method, setting: value}}, with the settings that differ.

    Model settings are compared among runs of one model, training settings among all runs.
    """
    records, found = {run: read_run(run) for run in runs}, {}
    for run, record in records.items():
        found[run] = {'model': model_name(record)}
        skipped = IGNORED | ignored
        with suppress(UserError):  # the model file may be gone
            skipped |= may_change(record)
        alike = [other for other in records.values() if model_name(other) == model_name(record)]
        for part, others in (('model_config', alike), ('settings', records.values())):
            found[run] |= {key: value for key, value in record[part].items() if key not in skipped - {'data'}
                           and any(other[part].get(key, value) != value for other in others)}
    return found


def setting_label(name: str, value) -> str:
    """Format a setting for a label: 'lr=0.0013', 'tokens=2.5M', 'data=fineweb_edu'."""
    if name == 'model':
        return value
    text = short_number(value) if isinstance(value, (int, float)) else Path(str(value)).name[:32]
    return f'{SHORT.get(name, name)}={text}'


def short_number(value: float) -> str:
    """Format a number for a label: '2.5M', '12345', '0.0001778'."""
    for unit, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if abs(value) >= unit:
            return f'{value / unit:.4g}{letter}'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def named(keys: Iterable[str], labels: str | None) -> dict[str, str]:
    """Return {key: label}. labels: 'A,B', one for each key; None: the keys themselves."""
    keys = list(keys)
    names = keys if labels is None else [label.strip() for label in labels.split(',')]
    if len(set(names)) < len(names) or len(names) != len(keys):
        raise UserError(f'labels is {labels!r}: expected {len(keys)} different names, separated by commas, for '
                        + '; '.join(keys))
    return dict(zip(keys, names))


def run_names(runs: list[str], labels: str | None) -> dict[str, str]:
    """Return {run: label} of figures without groups. labels None: the names of the folders."""
    return named(runs, labels) if labels else {run: Path(run).name for run in runs}


def group(runs: list[str], ignored: Set[str] = frozenset(), labels: str | None = None) -> dict[str, list[str]]:
    """Group runs that differ only in the seed, or in `ignored` settings: {label: run folders}.

    A label names the model or method if they differ, then as few settings as identify the groups.
    labels: see `Settings`.
    """
    groups = {}
    for run, settings in differences(runs, ignored).items():
        texts = {key: setting_label(key, value) for key, value in settings.items()}
        groups.setdefault(repr(settings), (texts, []))[1].append(run)
    configs, folders = zip(*groups.values())
    parts = [()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config if key != 'model')
    # settings missing in some groups come first: they belong to the model, not to training
    for key in ('model', *sorted(keys, key=lambda key: sum(key in config for config in configs))):
        longer = [part + ((config[key],) if key in config else ()) for part, config in zip(parts, configs)]
        if len(set(longer)) > len(set(parts)):
            parts = longer
    names = [printable(', '.join(part) or config['model']) for part, config in zip(parts, configs)]
    if len(set(names)) < len(names):  # different values may look the same when shortened
        names = [f'{name}, {members[0]}' for name, members in zip(names, folders)]
    return dict(zip(named(names, labels).values(), folders))


def comparison_warning(runs: list[str]) -> str | None:
    """Return a warning if the losses of these runs cannot be compared, else None."""
    data = [read_run(run)['data'] for run in runs]
    for key, what in (('n_ids', 'vocabularies'), ('sha256', 'data')):
        if len({part[key] for part in data}) > 1:
            return f'these runs have different {what}: their losses in nats per token cannot be compared'
    return None


def map_readable(items: Iterable, function: Callable) -> dict:
    """Return {item: function(item)}, skipping items that raise UserError or OSError.

    Errors are printed to stderr. If every item fails, the first error is raised.
    """
    found, errors = {}, []
    for item in items:
        try:
            found[item] = function(item)
        except (UserError, OSError) as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for error in errors:
        warn_once(f'left out: {error}')
    return found


def curves_of(runs: list[str], curve_of: Callable, ignored: Set[str] = frozenset(), labels: str | None = None) -> dict:
    """Return {label: curve_of(runs of that label)}, with runs grouped and labeled by `group`.

    Prints differing settings that are not in the labels, and errors of runs that it skips.
    """
    readable = list(map_readable(runs, read_run))
    groups, settings = group(readable, ignored, labels), differences(readable, ignored)
    curves = map_readable(groups, lambda label: curve_of(groups[label]))
    for label in curves if labels is None else []:
        texts = [setting_label(key, value) for key, value in settings[groups[label][0]].items() if key != 'model']
        if hidden := set(texts) - set(label.split(', ')):
            print(f'{label}: also {", ".join(sorted(hidden))}')
    if warning := comparison_warning([run for label in curves for run in groups[label]]):
        print(warning, file=sys.stderr)
    return curves


def one_per_seed(runs: list[str], value_of: Callable) -> dict:
    """Return {run: value_of(run)} of the readable runs, of runs that differ only in the seed."""
    seeds = {}

    def checked_value(run):
        value, seed = value_of(run), read_run(run)['settings'].get('seed')
        if seed in seeds:
            raise UserError(f'{run} duplicates {seeds[seed]}: all settings are equal, including the seed ({seed})')
        seeds[seed] = run
        return value
    return map_readable(runs, checked_value)


def finished(runs: list[str]) -> list[str]:
    """Return the finished runs, one per seed, of runs that differ only in the seed."""
    return list(one_per_seed(runs, final_loss))


def usable_runs(runs: list[str]) -> list[str]:
    """Return the `finished` runs, or all runs if none has a training log (imported models)."""
    return finished(runs) if any(map(read_log, runs)) else runs


def final_losses(runs: list[str]) -> list[float]:
    """Return the final validation losses of the `finished` runs."""
    return list(one_per_seed(runs, final_loss).values())


def curves_by_size(s, runs: list[str], curve_of: Callable, ignored: Set[str] = frozenset()) -> dict:
    """Return {size: result of `curves_of`}, sizes ascending, such as {'131.1M': {label: curve}}.

    The baseline comes first: s.baseline, or if it is None, standard if it is there, or the first
    label. Sizes without s.baseline, or with one label alone, are skipped with a message. s also has
    `labels`.
    """
    parameters, sizes = map_readable(runs, n_parameters), {}
    for run in sorted(parameters, key=parameters.get):
        if not sizes or parameters[run] > SAME_SIZE * max(sizes):
            sizes[parameters[run]] = []
        sizes[max(sizes)].append(run)

    def compared(n):
        curves = curves_of(sizes[n], curve_of, ignored, s.labels)
        baseline = s.baseline or next((label for label in curves if label == 'standard'), next(iter(curves)))
        if baseline not in curves or len(curves) < 2:
            raise UserError(f'the runs of {short_number(n)} parameters are {"; ".join(curves)}: expected '
                            f'{s.baseline or "a baseline"} and others')
        return {baseline: curves.pop(baseline), **curves}
    return {short_number(n): curves for n, curves in map_readable(sizes, compared).items()}


def curve(runs: list[str], key: str = 'val', what: str = 'validation loss', minus: dict | None = None) -> list[dict]:
    """Return points {'step', 'tokens', 'minutes', 'gpu_hours', 'flops', **spread} of a value.

    Only steps that every run logged are included. minus: {seed: run whose value is subtracted}.
    gpu_hours is None unless all runs used GPUs. flops is of the first run, None if unknown.
    """
    found = one_per_seed(runs, lambda run: records_of(run, key, minus))
    runs, logs = list(found), list(found.values())
    versions, flops, points = [read_run(run)['versions'] for run in runs], flops_per_token(runs[0]), []
    gpus = [v.get('processes', 1) if str(v.get('device')).startswith('cuda') else 0 for v in versions]
    for tokens in sorted(set.intersection(*map(set, logs))):
        values = [log[tokens][key] for log in logs]
        seconds = [log[tokens]['seconds'] for log in logs]
        gpu_hours = statistics.mean(n * s / 3600 for n, s in zip(gpus, seconds)) if all(gpus) else None
        points.append({'step': logs[0][tokens]['step'], 'tokens': tokens, 'minutes': statistics.mean(seconds) / 60,
                       'gpu_hours': gpu_hours, 'flops': flops and flops * tokens} | spread(values))
    if not points:
        raise UserError(f'{" ".join(map(str, runs))}: no {what} that all of these runs logged at the same step')
    return points


def records_of(run: str, key: str, minus: dict | None = None) -> dict[int, dict]:
    """Return {tokens: log record} of the records with `key`. minus: see `curve`."""
    records = {record['tokens']: record for record in read_log(run) if is_number(record.get(key))}
    if minus:
        if (seed := settings_of(run).seed) not in minus:
            raise UserError(f'{run} has seed {seed}: --minus has no run with that seed')
        others = records_of(minus[seed], key)
        records = {n: record | {key: record[key] - others[n][key]} for n, record in records.items() if n in others}
    return records


def holds_from(points: list[dict], holds: Callable) -> dict | None:
    """Return the first point from which holds(point) is true to the end, or None."""
    last = list(itertools.takewhile(holds, reversed(points)))
    return last[-1] if last else None


# ---- statistics over seeds ----

def spread(values: Sequence[float]) -> dict:
    """Return the mean, lowest and highest of one value per seed, and the number of seeds."""
    return {'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values), 'seeds': len(values)}


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95% interval of the mean by Student's t, (None, None) if all are equal."""
    if len(set(values)) < 2:
        return None, None
    from scipy import stats
    return stats.t.interval(0.95, len(values) - 1, statistics.mean(values), stats.sem(values))


def paired_gaps(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return a - b for each seed. If b is a single number, it is subtracted from all."""
    return [x - y for x, y in zip(a, b * len(a) if len(b) == 1 else b, strict=True)]


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return mean(a) - mean(b) and its 95% interval by Student's t, paired by seed."""
    gaps = paired_gaps(a, b)
    return statistics.mean(gaps), *interval(gaps)


def smallest_effect(sd: float, seeds: int, alpha: float, power: float = 0.8) -> float:
    """Return the effect that a two-sided paired t-test at level alpha finds with this power."""
    from scipy import optimize, stats
    critical = stats.t.ppf(1 - alpha / 2, seeds - 1)
    return sd / seeds ** 0.5 * optimize.brentq(lambda shift: stats.nct.sf(critical, seeds - 1, shift) - power, 0, 1000)


def lower_test(a: Sequence[float], b: Sequence[float], lead: float = 0.0) -> dict[str, float]:
    """Test mean(a) < mean(b) + lead by Welch's t-test. Returns {'gap', 't', 'degrees', 'p'}."""
    from scipy import stats
    found = stats.ttest_ind([x - lead for x in a], b, equal_var=False, alternative='less')
    return {'gap': statistics.mean(a) - statistics.mean(b), 't': found.statistic, 'degrees': found.df,
            'p': found.pvalue}


def equivalence_test(a: Sequence[float], b: Sequence[float], margin: float) -> dict[str, float]:
    """Test equality within a margin (TOST). Returns the one-sided test with the larger p."""
    worse = max(lower_test(a, b, margin), lower_test(b, a, margin), key=lambda side: side['p'])
    return worse | {'gap': statistics.mean(a) - statistics.mean(b)}


def interval_text(low: float | None, high: float | None, sign: str = '') -> str:
    """Format an interval, '' if it is None. sign: '+' for differences."""
    return '' if low is None else f'{low:{sign}.4f} to {high:{sign}.4f}'


# ---- files and plots ----

def output_path(out: str | None, runs: list[str], name: str) -> Path:
    """Return `out`, or `name` beside the first run, without extension. Creates the folder."""
    if out is None:
        path = Path(os.path.abspath(runs[0])).parent / name
    else:
        path = Path(out.removesuffix('.png').removesuffix('.csv').removesuffix('.html'))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read_csv(path) -> list[dict[str, str]]:
    """Read the rows of a CSV file as dicts of strings."""
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def write_csv(path, rows: list[dict]) -> None:
    """Write rows (dicts with the same keys) as a CSV file with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode(errors='replace'))


def new_figure(title: str, *args, figsize, **kwargs) -> tuple:
    """Return (figure, axes) of Figure.subplots(*args, **kwargs) in our style. Needs no display."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update({'axes.grid': True, 'grid.alpha': 0.3, 'axes.titlesize': 'medium',
                                'legend.frameon': False, 'legend.title_fontsize': 'small'})
    figure = Figure(figsize, layout='constrained')
    figure.suptitle(title)
    return figure, figure.subplots(*args, **kwargs)


def panels(title: str, n: int, columns: int, size: tuple[float, float], **kwargs) -> tuple:
    """Return (figure, n axes of this size in inches), with at most `columns` axes per row."""
    columns, (width, height) = min(columns, n), size
    rows = -(-n // columns)
    figure, axes = new_figure(title, rows, columns, figsize=(width * columns, height * rows), squeeze=False, **kwargs)
    for unused in axes.flat[n:]:
        unused.set_axis_off()
    return figure, axes.flat[:n]


def by_label(rows: list[dict]) -> dict[str, list[dict]]:
    """Group rows by their label: {label: rows}."""
    labels = dict.fromkeys(row['label'] for row in rows)
    return {label: [row for row in rows if row['label'] == label] for label in labels}


def styled(lines: dict) -> list[tuple]:
    """Return (label, line, {'color', 'linestyle'}) of {label: line}, with 40 distinct styles."""
    return [(label, line, {'color': f'C{i % 10}', 'linestyle': ('-', '--', ':', '-.')[i // 10 % 4]})
            for i, (label, line) in enumerate(lines.items())]


def draw_band(axes, x: list, points: list[dict], **style):
    """Draw the means of points over x in a band from lowest to highest seed. Return the line."""
    marker = 'o' if len(points) <= 40 else None
    line, = axes.plot(x, [p['mean'] for p in points], marker=marker, markersize=3, **style)
    axes.fill_between(x, [p['lowest'] for p in points], [p['highest'] for p in points], alpha=0.2,
                      color=line.get_color(), linewidth=0)
    return line


def number_log_axis(axis, lowest: float, highest: float) -> None:
    """Add tick labels to a log axis. By default only powers of ten have labels."""
    from matplotlib import ticker
    subs = (1, 2, 5) if highest < 300 * lowest else (1,)
    axis.set_major_locator(ticker.MaxNLocator(6) if highest < 10 * lowest else ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f'{x:g}'))
    axis.set_minor_locator(ticker.NullLocator())


def write_figure(out: str | None, runs: list[str], name: str, rows: list[dict], figure) -> None:
    """Write rows to NAME.csv and the figure to NAME.png at `output_path`, and print the paths."""
    path = output_path(out, runs, name)
    write_csv(f'{path}.csv', rows)
    figure.savefig(f'{path}.png', dpi=150)
    print(f'written to {path}.png and {path}.csv')


def smoothed(values, length: int):
    """Smooth values (n,) by a Savitzky-Golay filter of order 2 over `length` points, at most n."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
