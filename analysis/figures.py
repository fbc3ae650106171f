"""Shared by the figures and tables: reading runs, grouping and labelling them, statistics over seeds, plots."""
import csv
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from common.continuing import MAY_CHANGE
from common.files import UserError, command, friendly_errors, warn_once
from common.machine import pick_device, pick_dtype
from common.runs import count_parameters, load_run, meta_run, read_log, read_run, run_data
from common.settings import load_settings, make_settings
from data.shards import Data
from train import Settings as TrainSettings

# settings that do not tell runs apart
NO_DIFFERENCE = (MAY_CHANGE | {'seed', 'extend', 'model', 'method', 'vocab_size', 'n_ids', 'eos_id'}) - {'data'}
SHORT = {'learning_rate': 'lr', 'max_tokens': 'tokens'}  # names in labels
SAME_SIZE = 1.1  # largest ratio of the parameters of models of one size


# ---- one run ----

@contextmanager
def runs_to_read(usage: str, Settings: type, argv: list[str] | None) -> Iterator[tuple]:
    """Context manager of a script: yields (settings, run folders) of its command line, prints errors as sentences.

    usage: the module's name and its arguments, for a command line without runs.
    """
    with friendly_errors():
        s, runs, _ = load_settings(Settings, argv)
        if not runs:
            raise UserError(f'which runs? python -m analysis.{usage}')
        yield s, runs


def load_model_and_data(run: str, s) -> tuple:
    """Return (model, config.json, data) of a run on s.device; s.data None: the run's own data."""
    model, record = load_run(run, pick_device(s.device))
    return model, record, run_data(record, s.data, run)


def autocast(dtype: str, device: torch.device):
    """Return the context manager of matrix products in a dtype: float32, bfloat16 or auto."""
    picked = pick_dtype(dtype, device.type)
    return torch.autocast(device.type, picked, enabled=picked != torch.float32)


def model_name(record: dict) -> str:
    """Return the name of a run's model for labels: its method if it has one. record: its config.json."""
    return str(record['model_config'].get('method', record['model']))


def settings_of(run: str) -> TrainSettings:
    """Return a run's training settings."""
    return make_settings(TrainSettings, read_run(run)['settings'], f'in {run}/config.json')


def n_parameters(run: str) -> int:
    """Return the number of parameters of a run's model, tied ones counted once."""
    return count_parameters(meta_run(run))


def final_loss(run: str) -> float:
    """Return the last validation loss of a run, in nats per token; UserError if its training is not finished."""
    evaluated = [record for record in read_log(run) if is_number(record.get('val'))]
    if not evaluated:
        raise UserError(f'{run}: no validation loss was logged')
    tokens, planned = evaluated[-1]['tokens'], settings_of(run).max_tokens
    if tokens < planned:
        raise UserError(f'{run} was last evaluated at {tokens:,} of its {planned:,} tokens: train it to its end, with '
                        + command('train.py', f'--out_dir={run}', '--resume'))
    return evaluated[-1]['val']


def flops_per_token(run: str) -> float | None:
    """Return the matmul FLOPs of a training token, None if the model file has changed or cannot tell."""
    record = read_run(run)
    try:
        return meta_run(run).flops_per_token(record['settings']['block_size'])
    except Exception:  # a model file that was edited since, or that has no flops_per_token
        return None


def evaluations(path: Path) -> dict[str, float]:
    """Return {'task metric': value} of eval.jsonl, the latest where there are several.

    Options that change the result follow the metric, and the step where training had not ended.
    """
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        asked = ('data', 'val_tokens', 'limit', 'bos', 'max_length')  # None by default
        options = [f'{key}={value}' for key, value in record.get('settings', {}).items()
                   if key in asked and value is not None]
        if record.get('of_steps') and record['step'] < record['of_steps']:
            options.append(f'step={record["step"]}')
        for task, metrics in record['results'].items():
            if task != 'speculative':  # a table of its own, speculative.csv
                found |= {' '.join([task, metric, *options]): value for metric, value in metrics.items()
                          if is_number(value)}
    return found


def logged(log: list[dict], key: str) -> list[float]:
    return [record[key] for record in log if is_number(record.get(key))]


def median(log: list[dict], key: str) -> float | None:
    """Return the median of a logged value, None if it was not logged."""
    values = logged(log, key)
    return statistics.median(values) if values else None


# ---- documents of their data ----

def fitting_block(runs: list[str], block_size: int) -> int:
    """Return block_size, or the windows of the runs if they are shorter, and print which."""
    shortest = min(read_run(run)['settings']['block_size'] for run in runs)
    if shortest < block_size:
        print(f'these runs read windows of {shortest} tokens, not {block_size}: documents are read to {shortest}')
    return min(block_size, shortest)


def long_documents(data, least: int, most: int, n: int, seed: int | None = None) -> list:
    """Return n validation documents of at least `least` tokens, eos counted, cut to `most`, as int64 arrays.

    They are the first ones, or those of a permutation by `seed`. If the data has fewer, says how many on stderr. Raises
    UserError if it has none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task, whose rows are no documents: give --data=FOLDER with documents')
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

def differences(runs: list[str], besides: Set[str] = frozenset()) -> dict[str, dict]:
    """Return {run: {'model': its model or method, setting: value}} of the settings that differ, without `besides`.

    A setting of the model is compared with the other runs of that model, one of training with all runs.
    """
    records, found = {run: read_run(run) for run in runs}, {}
    for run, record in records.items():
        found[run] = {'model': model_name(record)}
        alike = [other for other in records.values() if model_name(other) == model_name(record)]
        for part, others in (('model_config', alike), ('settings', records.values())):
            found[run] |= {key: value for key, value in record[part].items() if key not in NO_DIFFERENCE | besides
                           and any(other[part].get(key, value) != value for other in others)}
    return found


def short(name: str, value) -> str:
    """Return a setting for a label: 'lr=0.0013', 'tokens=2.5M', 'window=None', 'data=fineweb_edu'."""
    if name == 'model':
        return value
    text = short_number(value) if isinstance(value, (int, float)) else Path(str(value)).name[:32]
    return f'{SHORT.get(name, name)}={text}'


def short_number(value: float) -> str:
    """2500000 -> '2.5M', 12345 -> '12345', 0.000177828 -> '0.0001778'."""
    for unit, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if abs(value) >= unit:
            return f'{value / unit:.4g}{letter}'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def group(runs: list[str], besides: Set[str] = frozenset()) -> dict[str, list[str]]:
    """Return {label: [run folder, one per seed]}; runs that differ in the settings `besides` share a group.

    A label has the model or method, where they differ, then as few differing settings as distinguish the groups.
    """
    groups = {}
    for run, settings in differences(runs, besides).items():
        texts = {key: short(key, value) for key, value in settings.items()}
        groups.setdefault(repr(settings), (texts, []))[1].append(run)
    configs, folders = zip(*groups.values())
    parts = [()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config if key != 'model')
    # what only some have is of their model, and says more than how they were trained
    for key in ('model', *sorted(keys, key=lambda key: sum(key in config for config in configs))):
        longer = [part + ((config[key],) if key in config else ()) for part, config in zip(parts, configs)]
        if len(set(longer)) > len(set(parts)):
            parts = longer
    labels = [', '.join(part) or config['model'] for part, config in zip(parts, configs)]
    if len(set(labels)) < len(labels):  # values that are alike when they are short
        labels = [f'{label}, {Path(runs_of_label[0]).name}' for label, runs_of_label in zip(labels, folders)]
    return dict(zip(labels, folders))


def not_comparable(runs: list[str]) -> str | None:
    """Return a warning if the losses of these runs cannot be compared, else None."""
    data = [read_run(run)['data'] for run in runs]
    for key, what in (('n_ids', 'vocabularies'), ('sha256', 'data')):
        if len({part[key] for part in data}) > 1:
            return f'these runs have different {what}: their losses in nats per token cannot be compared'
    return None


def of_each(items: Iterable, function: Callable) -> dict:
    """Return {item: function(item)}, without items for which it raises UserError or OSError; these go to stderr.

    Raises the first of the errors if no item is left.
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
        print(f'left out: {error}', file=sys.stderr)
    return found


def curves_of(runs: list[str], curve_of: Callable, besides: Set[str] = frozenset()) -> dict:
    """Return {label: curve_of(its runs)} with the labels of `group`. Prints differing settings that no label has.

    Runs that cannot be drawn are left out and named on stderr. Raises UserError if none is left.
    """
    readable = list(of_each(runs, read_run))
    groups, settings = group(readable, besides), differences(readable, besides)
    curves = of_each(groups, lambda label: curve_of(groups[label]))
    for label in curves:
        texts = [short(key, value) for key, value in settings[groups[label][0]].items() if key != 'model']
        if unsaid := set(texts) - set(label.split(', ')):
            print(f'{label}: also {", ".join(sorted(unsaid))}')
    if warning := not_comparable([run for label in curves for run in groups[label]]):
        print(warning, file=sys.stderr)
    return curves


def finished(runs: list[str]) -> list[str]:
    """Return the finished ones of runs that differ only in the seed, one per seed."""
    seeds = {}

    def check(run):
        final_loss(run)
        seed = settings_of(run).seed
        if seed in seeds:
            raise UserError(f'{run} differs from {seeds[seed]} in nothing, not even in the seed ({seed})')
        seeds[seed] = run
    return list(of_each(runs, check))


def ended(runs: list[str]) -> list[str]:
    """Return the `finished` runs, or all of them if none has a log, such as imported ones."""
    return finished(runs) if any(map(read_log, runs)) else runs


def final_losses(runs: list[str]) -> list[float]:
    """Return the final loss of each of the `finished` runs."""
    return [final_loss(run) for run in finished(runs)]


def beside(baseline: str, runs: list[str], curve_of: Callable, besides: Set[str] = frozenset()) -> dict[str, dict]:
    """Return {'131.1M': {label: curve_of(its runs)}}, as `curves_of` at each size, from small to large.

    A size is named after its smallest model. One without the baseline, or with nothing else, is left out and named on
    stderr.
    """
    parameters, sizes = of_each(runs, n_parameters), {}
    for run in sorted(parameters, key=parameters.get):
        if not sizes or parameters[run] > SAME_SIZE * max(sizes):
            sizes[parameters[run]] = []
        sizes[max(sizes)].append(run)

    def compared(n):
        curves = curves_of(sizes[n], curve_of, besides)
        if baseline not in curves or len(curves) < 2:
            raise UserError(f'the runs of {short_number(n)} parameters are {"; ".join(curves)}: expected {baseline} '
                            'and others')
        return curves
    return {short_number(n): curves for n, curves in of_each(sizes, compared).items()}


def curve(runs: list[str], key: str = 'val', what: str = 'validation loss', minus: dict | None = None) -> list[dict]:
    """Return the points of a logged value at the steps where every run has it, minus that of {seed: another run}.

    A point is {'step', 'tokens', 'minutes', 'gpu_hours', 'flops'} and `spread`. gpu_hours is None unless all runs were
    on GPUs, flops (of one run) is None if unknown.
    """
    logs = [records_of(run, key, minus) for run in runs]
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
    """Return {tokens: record} of the log records that have a value, minus the value of {seed: another run}."""
    records = {record['tokens']: record for record in read_log(run) if is_number(record.get(key))}
    if minus:
        if (seed := settings_of(run).seed) not in minus:
            raise UserError(f'{run} has seed {seed}, which no run has that is subtracted')
        others = records_of(minus[seed], key)
        records = {n: record | {key: record[key] - others[n][key]} for n, record in records.items() if n in others}
    return records


def for_good(points: list[dict], holds: Callable) -> dict | None:
    """Return the first of the points from which holds(point) stays true, or None."""
    last = list(itertools.takewhile(holds, reversed(points)))
    return last[-1] if last else None


# ---- statistics over seeds ----

def spread(values: Sequence[float]) -> dict:
    return {'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values), 'seeds': len(values)}


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95% interval of the mean (Student's t); (None, None) where the values do not vary."""
    if len(set(values)) < 2:
        return None, None
    from scipy import stats
    return stats.t.interval(0.95, len(values) - 1, statistics.mean(values), stats.sem(values))


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return mean(a) - mean(b) and its 95% interval (Student's t), paired by seed or, if b is one number, to it."""
    gaps = [x - y for x, y in zip(a, b * len(a) if len(b) == 1 else b, strict=True)]
    return statistics.mean(gaps), *interval(gaps)


def lower_test(a: Sequence[float], b: Sequence[float], lead: float = 0.0) -> dict[str, float]:
    """One-sided test against the alternative that mean(a) < mean(b) + lead: {'gap', 't', 'degrees', 'p'}.

    Welch's test; the one-sample test if one side is a single number, which is then fixed.
    """
    from scipy import stats
    gap, shifted = statistics.mean(a) - statistics.mean(b), [x - lead for x in a]
    if len(b) == 1:
        found = stats.ttest_1samp(shifted, b[0], alternative='less')
    elif len(a) == 1:
        found = stats.ttest_1samp(b, shifted[0], alternative='greater')
    else:
        found = stats.ttest_ind(shifted, b, equal_var=False, alternative='less')
    return {'gap': gap, 't': found.statistic, 'degrees': found.df, 'p': found.pvalue}


def equivalence_test(a: Sequence[float], b: Sequence[float], margin: float) -> dict[str, float]:
    """TOST of whether the means differ by less than the margin: the `lower_test` of the two sides with the larger p."""
    worse = max(lower_test(a, b, margin), lower_test(b, a, margin), key=lambda side: side['p'])
    return worse | {'gap': statistics.mean(a) - statistics.mean(b)}


def between(low: float | None, high: float | None, sign: str = '') -> str:
    """Return an interval as text, empty if there is none. sign: '+' for a difference."""
    return '' if low is None else f'{low:{sign}.4f} to {high:{sign}.4f}'


# ---- files and plots ----

def output_path(out: str | None, runs: list[str], name: str) -> Path:
    """Return where to write figures, without extension: `out`, or `name` beside the first run. Creates folders."""
    if out is None:
        path = Path(os.path.abspath(runs[0])).parent / name
    else:
        path = Path(out.removesuffix('.png').removesuffix('.csv').removesuffix('.html'))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read_csv(path) -> list[dict[str, str]]:
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def write_csv(path, rows: list[dict]) -> None:
    """Write rows, dicts with the same keys."""
    with open(path, 'w', newline='', errors='replace') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def new_figure(*args, **kwargs) -> tuple:
    """matplotlib's (figure, axes) of subplots(*args, **kwargs), drawn without a display."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams.update({'axes.grid': True, 'grid.alpha': 0.3, 'legend.frameon': False})
    return plt.subplots(*args, layout='constrained', **kwargs)


def panels(n: int, columns: int, size: tuple[float, float], **kwargs) -> tuple:
    """Return (figure, n axes of this size in inches), at most `columns` of them side by side."""
    columns = min(columns, n)
    rows = -(-n // columns)
    figure, axes = new_figure(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **kwargs)
    for unused in axes.flat[n:]:
        unused.set_axis_off()
    return figure, axes.flat[:n]


def line_styles(n: int) -> list[dict]:
    """Return n colours and line styles, all different up to 40."""
    return [{'color': f'C{i % 10}', 'linestyle': ('-', '--', ':', '-.')[i // 10 % 4]} for i in range(n)]


def by_label(rows: list[dict]) -> dict[str, list[dict]]:
    """Return {label: its rows}."""
    labels = dict.fromkeys(row['label'] for row in rows)
    return {label: [row for row in rows if row['label'] == label] for label in labels}


def styled(lines: dict) -> Iterable[tuple]:
    """Return (label, line, its style) of {label: line}."""
    return zip(lines, lines.values(), line_styles(len(lines)))


def draw_band(axes, x: list, points: list[dict], **style):
    """Draw a line of the points' means over x in a band from the lowest to the highest seed. Return the line."""
    marker = 'o' if len(points) <= 40 else None
    line, = axes.plot(x, [p['mean'] for p in points], marker=marker, markersize=3, **style)
    axes.fill_between(x, [p['lowest'] for p in points], [p['highest'] for p in points], alpha=0.2,
                      color=line.get_color(), linewidth=0)
    return line


def number_log_axis(axis, lowest: float, highest: float) -> None:
    """Label a log axis from lowest to highest. matplotlib labels powers of ten only, and there may be none."""
    from matplotlib import ticker
    axis.set_major_locator(ticker.MaxNLocator(6) if highest < 10 * lowest else ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f'{x:g}'))
    axis.set_minor_locator(ticker.NullLocator())


def save_figure(figure, path) -> None:
    """Write a figure as PNG and close it."""
    import matplotlib.pyplot as plt
    figure.savefig(path, dpi=150, format='png')
    plt.close(figure)


def write_figure(out: str | None, runs: list[str], name: str, rows: list[dict], figure) -> None:
    """Write rows to NAME.csv and the figure to NAME.png, see `output_path`; print where."""
    path = output_path(out, runs, name)
    write_csv(f'{path}.csv', rows)
    save_figure(figure, f'{path}.png')
    print(f'written to {path}.png and {path}.csv')


def is_number(value) -> bool:
    """Return whether a logged value can be drawn."""
    return isinstance(value, (int, float)) and isfinite(value)


def smoothed(values, length: int):
    """Return the trend of values (n,): a Savitzky-Golay filter of order 2 over `length` points, or all if fewer."""
    from scipy.signal import savgol_filter
    length = min(length, len(values))
    return savgol_filter(values, length, 2) if length > 2 else values
