"""Validation loss against training tokens and against training time, runs that differ only in the seed averaged (SPS paper, figure 2).

    python -m analysis.loss_curves RUN RUN ... --out=NAME

Writes NAME.png (a line per configuration, a band from the lowest to the highest seed) and NAME.csv, and prints where each
line goes below the first one's for good. Time is that of the runs' own logs: compare runs that had the same machine.
"""
import statistics
import sys
from dataclasses import dataclass

from analysis import write_csv
from common.files import UserError, friendly_errors
from common.runs import read_log, read_run
from common.settings import load_settings

NO_DIFFERENCE = {'seed', 'out_dir', 'resume', 'overwrite', 'verify', 'micro_batch_size', 'eval_interval', 'log_interval', 'save_interval',
                 'keep_checkpoints', 'sample_tokens', 'wandb_project', 'device', 'compile', 'threads'}  # to what a curve is


@dataclass
class Settings:
    out: str = 'loss_curves'  # NAME of the files to write, without ending


def group(runs):
    """{label: [run folder, one a seed]}. A label is the method or model, then the settings in which runs differ: those of
    training among all runs, those of the model among the runs of that method."""
    own = {}
    for run in runs:
        record = read_run(run)
        name = record['model_config'].get('method', record['model'])
        training = {k: v for k, v in record['settings'].items() if k not in NO_DIFFERENCE | {'model'}}
        own[run] = name, training, record['model_config']
    groups = {}
    for name, training, model in own.values():
        differs = [f'{k}={v}' for k, v in training.items() if any(other[1].get(k) != v for other in own.values())]
        differs += [f'{k}={v}' for k, v in model.items() if any(other[0] == name and other[2].get(k) != v for other in own.values())]
        groups[', '.join([name, *differs])] = [run for run in runs if own[run] == (name, training, model)]
    return groups


def curve(runs, key='val', what='validation loss'):
    """Points {'step', 'tokens', 'minutes', 'mean', 'lowest', 'highest', 'seeds'} of a logged value at the steps where every run has it."""
    logs = []
    for run in runs:
        logs.append({r['tokens']: r for r in read_log(run) if key in r})
    points = []
    for tokens in sorted(set.intersection(*map(set, logs))):
        values = [log[tokens][key] for log in logs]
        points.append({'step': logs[0][tokens]['step'], 'tokens': tokens, 'minutes': statistics.mean(log[tokens]['seconds'] for log in logs) / 60,
                       'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values), 'seeds': len(logs)})
    if not points:
        raise UserError(f'{" ".join(map(str, runs))}: no {what} that all of these runs logged at the same step')
    return points


def loss_at(points, axis, at):
    """The mean loss of a curve at a value of 'tokens' or 'minutes', linear between its points, None outside."""
    for a, b in zip(points, points[1:]):
        if a[axis] <= at <= b[axis]:
            return a['mean'] + (b['mean'] - a['mean']) * (at - a[axis]) / (b[axis] - a[axis])
    return None


def crossing(points, first, axis):
    """Where `points` go below the curve `first` and stay there, or None."""
    where = None
    for p in points:
        other = loss_at(first, axis, p[axis])
        if other is not None:
            where = None if p['mean'] >= other else p[axis] if where is None else where
    return where


def plot(curves, path):
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, both = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout='constrained')
    for axes, axis, scale, name in zip(both, ('tokens', 'minutes'), (1e-6, 1), ('million tokens', 'minutes of training')):
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


def main():
    with friendly_errors():
        s, runs, _ = load_settings(Settings, sys.argv[1:])
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
