"""Validation loss against training tokens, time and FLOPs, runs that differ only in the seed averaged.

    python -m analysis.loss_curves RUN RUN ... --out=NAME

Writes NAME.png (a line per configuration, a band from the lowest to the highest seed) and NAME.csv, and prints where
each line goes below the first one's for good, as figure 2 of the SPS paper does. Time is that of the runs' own logs:
compare runs that had the same machine. Where all runs were on GPUs it is GPU-hours, wall time times the GPUs that the
run began with. FLOPs are the model's `flops_per_token`. A run that cannot be drawn is left out, and named.

The picture begins where the steep start is over, after a quarter of each line, so that the ends can be told apart; the
CSV has all of it.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from analysis.figures import (
    draw_band,
    is_number,
    line_styles,
    new_figure,
    number_log_axis,
    output_path,
    save_figure,
    write_csv,
)
from common.files import UserError, friendly_errors
from common.run_settings import MAY_CHANGE
from common.runs import blank_run, read_log, read_run
from common.settings import load_settings

# settings that do not change what a curve is; the last three follow from the data and `documents`
NO_DIFFERENCE = (MAY_CHANGE | {'seed', 'extend', 'model', 'method', 'vocab_size', 'n_ids', 'eos_id'}) - {'data'}
TOKENS = (1, 'tokens'), (1e3, 'thousand tokens'), (1e6, 'million tokens'), (1e9, 'billion tokens')
MINUTES = (1, 'minutes'), (60, 'hours'), (60 * 24, 'days')
GPU_HOURS = (1, 'GPU-hours'), (1e3, 'thousand GPU-hours')
FLOPS = tuple((10.0 ** power, f'1e{power} FLOPs') for power in range(0, 31, 3))
SHORT = {'learning_rate': 'lr', 'max_tokens': 'tokens'}  # names in labels


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: loss_curves beside the runs


# ---- what the runs are ----

def runs_to_read(usage: str, Settings: type, argv: list[str] | None) -> tuple:
    """(settings, run folders) of the command line of a file of analysis/; where it names no runs, a UserError.

    usage: the file's name and its arguments, for that sentence.
    """
    s, runs, _ = load_settings(Settings, argv)
    if not runs:
        raise UserError(f'which runs? python -m analysis.{usage}')
    return s, runs


def differences(runs: list[str], besides: Set[str] = frozenset()) -> dict[str, dict]:
    """{run: {'model': its model or method, setting: value}} of the settings in which runs differ, but for `besides`.

    A setting of the model is compared with the other runs of that model, one of training with all. A run of older code
    has no value for settings that came later, and differs from nobody in them.
    """
    names, model, training = {}, {}, {}
    for run in runs:
        record = read_run(run)
        names[run] = model_name(record)
        model[run] = without(record['model_config'], NO_DIFFERENCE | besides)
        training[run] = without(record['settings'], NO_DIFFERENCE | besides)
    found = {}
    for run in runs:
        alike = [model[other] for other in runs if names[other] == names[run]]
        own = {key: value for settings, others in ((model[run], alike), (training[run], training.values()))
               for key, value in settings.items() if any(other.get(key, value) != value for other in others)}
        found[run] = {'model': names[run], **own}
    return found


def model_name(record: dict) -> str:
    """What labels call the model of a run's config.json: its method if it has one."""
    return str(record['model_config'].get('method', record['model']))


def without(settings: dict, names: Set[str]) -> dict:
    return {key: value for key, value in settings.items() if key not in names}


def shorts(settings: dict) -> dict[str, str]:
    """The settings of `differences` as texts for a label."""
    return {key: short(key, value) for key, value in settings.items()}


def short(name: str, value) -> str:
    """A setting for a label: 'lr=0.0013', 'tokens=2.5M', 'bptt', 'no window', 'data=fineweb_edu'."""
    if name == 'model':
        return value
    name = SHORT.get(name, name)
    if value is None or isinstance(value, bool):
        return name if value else f'no {name}'
    if isinstance(value, (int, float)):
        return f'{name}={short_number(value)}'
    return f'{name}={shortened(str(value).rstrip("/").rpartition("/")[2])}'


def short_number(value: float) -> str:
    """2500000 -> '2.5M', 12345 -> '12345', 0.000177828 -> '0.0001778'."""
    for unit, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if abs(value) >= unit:
            return f'{value / unit:.4g}{letter}'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def shortened(text: str, length: int = 32) -> str:
    return text if len(text) <= length else f'{text[:length - 3]}...'


def group(runs: list[str], besides: Set[str] = frozenset()) -> dict[str, list[str]]:
    """{label: [run folder, one a seed]}; runs that differ in the settings `besides` are in one group too.

    A label has the model or method, where they differ, then as few of the settings that differ as tell the groups
    apart.
    """
    groups = {}
    for run, settings in differences(runs, besides).items():
        groups.setdefault(repr(settings), (shorts(settings), []))[1].append(run)
    configs, folders = zip(*groups.values())
    labels = tell_apart(configs)
    if len(set(labels)) < len(labels):  # values that are alike when they are short
        labels = [f'{label}, {Path(runs_of_label[0]).name}' for label, runs_of_label in zip(labels, folders)]
    return dict(zip(labels, folders))


def tell_apart(configs: Sequence[dict[str, str]]) -> list[str]:
    """A label for each {'model': its name, setting: text}, of as few of these as tell them apart."""
    parts = [()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config if key != 'model')
    # what only some have is of their model, and says more than how they were trained
    for key in ('model', *sorted(keys, key=lambda key: sum(key in config for config in configs))):
        longer = [part + ((config[key],) if key in config else ()) for part, config in zip(parts, configs)]
        if len(set(longer)) > len(set(parts)):
            parts = longer
    return [', '.join(part) or config['model'] for part, config in zip(parts, configs)]


def not_comparable(runs: list[str]) -> str | None:
    """A sentence where losses of these runs say nothing about each other, else None."""
    data = [read_run(run)['data'] for run in runs]
    for key, what in (('n_ids', 'vocabularies'), ('sha256', 'data')):
        if len({part[key] for part in data}) > 1:
            return f'these runs have different {what}: their losses in nats per token cannot be compared'
    return None


def of_each(items: Iterable, function: Callable) -> dict:
    """{item: function(item)}. Items for which that raises a UserError or OSError are left out, and named on stderr.

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
    """{label: curve_of(the label's runs)}, the labels those of `group`. Prints what differs and is not in a label.

    Runs that cannot be drawn are left out, and named on stderr. Raises a UserError if none is left.
    """
    readable = list(of_each(distinct(runs), read_run))
    groups, settings = group(readable, besides), differences(readable, besides)
    curves = of_each(groups, lambda label: curve_of(groups[label]))
    for label in curves:
        texts = shorts(settings[groups[label][0]])
        unsaid = [text for key, text in texts.items() if key != 'model' and text not in label.split(', ')]
        if unsaid:
            print(f'{label}: also {", ".join(unsaid)}')
    if warning := not_comparable([run for label in curves for run in groups[label]]):
        print(warning, file=sys.stderr)
    return curves


def distinct(runs: list[str]) -> list[str]:
    """The runs, each folder once, whatever the paths that name it."""
    by_folder = {}
    for run in runs:
        by_folder.setdefault(os.path.realpath(run), run)
    return list(by_folder.values())


# ---- their curves ----

def curve(runs: list[str], key: str = 'val', what: str = 'validation loss') -> list[dict]:
    """Points of a logged value at the steps where every run has it.

    A point is {'step', 'tokens', 'minutes', 'gpu_hours', 'flops', 'mean', 'lowest', 'highest', 'seeds'}. gpu_hours is
    None unless all the runs were on GPUs, flops (of one run) None where the model file cannot tell them.
    """
    def is_whole(record):
        return all(is_number(record.get(name)) for name in ('step', 'tokens', 'seconds', key))
    logs = [{record['tokens']: record for record in read_log(run) if is_whole(record)} for run in runs]
    gpus, flops = [n_gpus(run) for run in runs], flops_per_token(runs[0])
    points = []
    for tokens in sorted(set.intersection(*map(set, logs))):
        values = [log[tokens][key] for log in logs]
        seconds = [log[tokens]['seconds'] for log in logs]
        gpu_hours = statistics.mean(n * s / 3600 for n, s in zip(gpus, seconds)) if all(gpus) else None
        points.append({'step': logs[0][tokens]['step'], 'tokens': tokens, 'minutes': statistics.mean(seconds) / 60,
                       'gpu_hours': gpu_hours, 'flops': flops and flops * tokens,
                       'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values),
                       'seeds': len(logs)})
    if not points:
        raise UserError(f'{" ".join(map(str, runs))}: no {what} that all of these runs logged at the same step')
    return points


def n_gpus(run: str) -> int:
    """The GPUs that a run began with; 0 on a CPU."""
    versions = read_run(run)['versions']
    processes = versions.get('processes', 1)
    return processes if str(versions.get('device')).startswith('cuda') and is_number(processes) else 0


def flops_per_token(run: str) -> float | None:
    """Matmul FLOPs of training a token, or None: the run's log can be drawn without its model file."""
    record = read_run(run)
    try:
        return blank_run(run).flops_per_token(record['settings']['block_size'])
    except Exception:  # a model file that was edited since, or that has no flops_per_token
        return None


def loss_at(points: list[dict], axis: str, x: float) -> float | None:
    """The mean loss of a curve at a value of an axis as 'tokens', linear between its points, None outside."""
    for point in points:
        if point[axis] == x:
            return point['mean']
    for a, b in zip(points, points[1:]):
        if a[axis] < x < b[axis]:
            return a['mean'] + (b['mean'] - a['mean']) * (x - a[axis]) / (b[axis] - a[axis])
    return None


def crossing(points: list[dict], first: list[dict], axis: str) -> float | None:
    """Where `points` go below the curve `first` and stay there, or None."""
    where = None
    for p in points:
        other = loss_at(first, axis, p[axis])
        if other is None:
            continue
        if p['mean'] >= other:
            where = None
        elif where is None:
            where = p[axis]
    return where


def crossings(points: list[dict], first: list[dict]) -> list[str]:
    """Where `points` go below the curve `first` for good, over each axis that both have, as texts."""
    texts = {'tokens': ('', '{:,.0f} tokens'), 'minutes': ('by time ', '{:.1f} minutes'),
             'gpu_hours': ('by GPUs ', '{:,.1f} GPU-hours'), 'flops': ('by compute ', '{:.3g} FLOPs')}
    found = []
    for axis, (by, amount) in texts.items():
        if points[-1][axis] is not None and first[-1][axis] is not None:
            where = crossing(points, first, axis)
            found.append(f'{by}from {"no point" if where is None else amount.format(where)} on')
    return found


# ---- the picture ----

def loss_limits(curves: list[list[dict]]) -> tuple[float, float]:
    """(lowest, highest) loss to show: of each curve all but its first quarter, so that none is out of sight."""
    lowest = min(p['lowest'] for points in curves for p in points)
    highest = max(p['highest'] for points in curves for p in points[len(points) // 4:])
    return lowest, max(highest, lowest + 1e-3)


def unit_for(largest: float, units: tuple) -> tuple[float, str]:
    """The largest of the units (size, name) that goes into `largest` twice, or the first."""
    return next((unit for unit in reversed(units) if largest >= 2 * unit[0]), units[0])


def axes_of(curves: list[list[dict]]) -> dict[str, tuple[float, str]]:
    """{what a loss is drawn over: (size of its unit, name)}: tokens, GPU-hours or else time, and FLOPs if known."""
    def largest(axis):
        values = [points[-1][axis] for points in curves]
        return None if None in values else max(values)
    has_gpus, has_flops = largest('gpu_hours') is not None, largest('flops') is not None
    units = {'tokens': TOKENS} | ({'gpu_hours': GPU_HOURS} if has_gpus else {'minutes': MINUTES})
    units |= {'flops': FLOPS} if has_flops else {}
    return {axis: unit_for(largest(axis), sizes) for axis, sizes in units.items()}


def plot(curves: dict[str, list[dict]], path) -> None:
    styles = line_styles(len(curves))
    columns = max(1, min(3, len(curves), 130 // (max(map(len, curves)) + 8)))
    rows = -(-len(curves) // columns)
    units = axes_of(list(curves.values()))
    figure, panels = new_figure(1, len(units), figsize=(5.5 * len(units), 4.5 + 0.2 * rows))
    lowest, highest = loss_limits(list(curves.values()))
    for axes, (axis, (unit, name)) in zip(panels, units.items()):
        for (label, points), style in zip(curves.items(), styles):
            x = [p[axis] / unit for p in points]
            marker = 'o' if len(points) <= 40 else None
            draw_band(axes, x, points, label=label, marker=marker, markersize=3, **style)
        set_loss_axis(axes, lowest, highest)
        axes.set(xlabel=f'{name} of training', xlim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=columns, frameon=False)
    save_figure(figure, path)


def set_loss_axis(axes, lowest: float, highest: float) -> None:
    """Shows losses from lowest to highest, in logarithms where one is far above the other."""
    margin = 0.04 * (highest - lowest)
    if 0 < 10 * lowest < highest:
        axes.set(yscale='log', ylim=(lowest / 1.1, highest * 1.1))
        number_log_axis(axes.yaxis, lowest, highest)
    else:
        axes.set(ylim=(lowest - margin, highest + margin))
    axes.set(ylabel='validation loss, nats per token')
    axes.grid(alpha=0.3)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('loss_curves RUN RUN ... --out=NAME', Settings, argv)
        curves = curves_of(runs, curve)
        out = output_path(s.out, runs, 'loss_curves')
        write_csv(f'{out}.csv', [{'label': label} | p for label, points in curves.items() for p in points])
        plot(curves, f'{out}.png')
        first = next(iter(curves.values()))
        for label, points in curves.items():
            end = points[-1]
            print(f'{label}: {end["mean"]:.4f} ({end["lowest"]:.4f} to {end["highest"]:.4f}, seeds: {end["seeds"]}) '
                  f'after {end["tokens"]:,} tokens, {end["minutes"]:.1f} minutes')
            if points is not first:
                print(f'  below the first line {", ".join(crossings(points, first))}')
        print(f'written to {out}.png and {out}.csv')


if __name__ == '__main__':
    main()
