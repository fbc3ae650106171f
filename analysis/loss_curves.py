"""Validation loss against training tokens and against time, runs that differ only in the seed averaged.

    python -m analysis.loss_curves RUN RUN ... --out=NAME

Writes NAME.png (a line per configuration, a band from the lowest to the highest seed) and NAME.csv, and prints where
each line goes below the first one's for good, as figure 2 of the SPS paper does. Time is that of the runs' own logs:
compare runs that had the same machine.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import statistics
import sys
from dataclasses import dataclass
from math import inf

from analysis import write_csv
from common.files import UserError, friendly_errors
from common.runs import read_log, read_run
from common.settings import load_settings

NO_DIFFERENCE = {  # settings that do not change what a curve is
    'seed', 'out_dir', 'resume', 'overwrite', 'verify', 'micro_batch_size', 'eval_interval', 'log_interval',
    'save_interval', 'keep_checkpoints', 'sample_tokens', 'wandb_project', 'device', 'compile', 'threads', 'scan'}


@dataclass
class Settings:
    out: str = 'loss_curves'  # NAME of the files to write, without ending


def group(runs: list[str]) -> dict[str, list[str]]:
    """{label: [run folder, one a seed]}.

    A label is the method or model, then the settings in which runs differ: those of training among all runs, those of
    the model among the runs of that method.
    """
    own = {}
    for run in runs:
        record = read_run(run)
        name = str(record['model_config'].get('method', record['model']))
        training, model = ({key: value for key, value in record[part].items() if key not in NO_DIFFERENCE | {'model'}}
                           for part in ('settings', 'model_config'))
        own[run] = name, training, model
    groups = {}
    for name, training, model in own.values():
        of_all = [other_training for _, other_training, _ in own.values()]
        of_method = [other_model for other_name, _, other_model in own.values() if other_name == name]
        label = ', '.join([name, *differences(training, of_all), *differences(model, of_method)])
        groups[label] = [run for run in runs if own[run] == (name, training, model)]
    return groups


def differences(settings: dict, others: list[dict]) -> list[str]:
    """'name=value' of the settings that are not the same in all the others."""
    return [f'{key}={value}' for key, value in settings.items() if any(other.get(key) != value for other in others)]


def curve(runs: list[str], key: str = 'val', what: str = 'validation loss') -> list[dict]:
    """Points of a logged value at the steps where every run has it.

    A point is {'step', 'tokens', 'minutes', 'mean', 'lowest', 'highest', 'seeds'}.
    """
    def is_whole(record):
        values = [record.get(name) for name in ('step', 'tokens', 'seconds', key)]
        return all(isinstance(value, (int, float)) and abs(value) < inf for value in values)
    logs = [{record['tokens']: record for record in read_log(run) if is_whole(record)} for run in runs]
    points = []
    for tokens in sorted(set.intersection(*map(set, logs))):
        values = [log[tokens][key] for log in logs]
        seconds = statistics.mean(log[tokens]['seconds'] for log in logs)
        points.append({'step': logs[0][tokens]['step'], 'tokens': tokens, 'minutes': seconds / 60,
                       'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values),
                       'seeds': len(logs)})
    if not points:
        raise UserError(f'{" ".join(map(str, runs))}: no {what} that all of these runs logged at the same step')
    return points


def loss_at(points: list[dict], axis: str, x: float) -> float | None:
    """The mean loss of a curve at a value of 'tokens' or 'minutes', linear between its points, None outside."""
    for a, b in zip(points, points[1:]):
        if a[axis] <= x <= b[axis]:
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


def plot(curves: dict[str, list[dict]], path) -> None:
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, both = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout='constrained')
    names = 'million tokens', 'minutes of training'
    for axes, axis, scale, name in zip(both, ('tokens', 'minutes'), (1e-6, 1), names):
        for label, points in curves.items():
            x = [p[axis] * scale for p in points]
            axes.plot(x, [p['mean'] for p in points], label=label, marker='o', markersize=3)
            axes.fill_between(x, [p['lowest'] for p in points], [p['highest'] for p in points], alpha=0.2)
        axes.set(xlabel=name)
        axes.grid(alpha=0.3)
    lowest = min(p['lowest'] for points in curves.values() for p in points)
    both[0].set(ylabel='validation loss, nats per token', ylim=(lowest - 0.03, lowest + 0.75))
    figure.legend(*both[0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if not runs:
            raise UserError('which runs? python -m analysis.loss_curves RUN RUN ... --out=NAME')
        curves = {label: curve(folders) for label, folders in group(runs).items()}
        rows = [{'label': label} | p for label, points in curves.items() for p in points]
        write_csv(f'{s.out}.csv', rows)
        plot(curves, f'{s.out}.png')
        first = next(iter(curves.values()))
        for label, points in curves.items():
            end = points[-1]
            print(f'{label}: {end["mean"]:.4f} ({end["lowest"]:.4f} to {end["highest"]:.4f}, {end["seeds"]} seeds) '
                  f'after {end["tokens"]:,} tokens, {end["minutes"]:.1f} minutes')
            if points is not first:
                tokens, minutes = crossing(points, first, 'tokens'), crossing(points, first, 'minutes')
                print(f'  below the first line from {"no point on" if tokens is None else f"{tokens:,} tokens on"}, '
                      f'by time from {"no point on" if minutes is None else f"{minutes:.1f} minutes on"}')
        print(f'written to {s.out}.png and {s.out}.csv')


if __name__ == '__main__':
    main()
