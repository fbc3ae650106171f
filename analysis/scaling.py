"""What a method gains over the baseline, by size: figure 3 of the SPS paper.

    python eval.py RUN RUN ... --paper=sps
    python -m analysis.scaling RUN RUN ... --out=NAME

At each size, beside the runs of `baseline`: 100 times the difference of the mean accuracy (percentage points, from
eval.jsonl), and the difference of the final validation loss. Seeds are averaged. Runs are of one size if their numbers
of parameters are within 10% of each other. Writes NAME.png and NAME.csv.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import statistics
from dataclasses import dataclass
from pathlib import Path

from analysis.figures import (
    beside,
    evaluations,
    final_loss,
    finished,
    line_styles,
    n_parameters,
    new_figure,
    runs_to_read,
    write_figure,
)
from common.files import UserError, friendly_errors
from eval import PAPERS


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: scaling beside the runs
    baseline: str = 'standard'  # label, or model or method, of what the others are compared with
    paper: str = 'sps'  # whose tasks the accuracy is the mean of: sps, nextlat or gpn, as in eval.py

    def __post_init__(self):
        if self.paper not in PAPERS:
            raise UserError(f'paper is {self.paper!r}: expected {", ".join(PAPERS)}')


def accuracies(run: str, paper: str) -> dict[str, float]:
    """{task: accuracy of 0 to 1}, of the paper's tasks that eval.jsonl has, each with the metric that it reports."""
    found = evaluations(Path(run) / 'eval.jsonl')
    metrics = PAPERS[paper][0]
    return {task: found[f'{task} {metric}'] for task, metric in metrics.items()
            if metric.startswith('acc') and f'{task} {metric}' in found}


def outcome(runs: list[str], paper: str) -> dict:
    """{'parameters', 'seeds', 'loss', 'accuracy'}: means over runs that differ only in the seed, those `finished`.

    Accuracy is None unless all the paper's tasks of all of them were evaluated.
    """
    runs = finished(runs)
    n_tasks = sum(metric.startswith('acc') for metric in PAPERS[paper][0].values())
    scores = [accuracies(run, paper) for run in runs]
    is_complete = all(len(of_run) == n_tasks for of_run in scores)
    return {'parameters': n_parameters(runs[0]), 'seeds': len(runs), 'loss': statistics.mean(map(final_loss, runs)),
            'accuracy': statistics.mean(statistics.mean(of_run.values()) for of_run in scores) if is_complete else None}


def gains(outcomes: dict[str, dict], baseline: str) -> list[dict]:
    """A row for each group besides the baseline, of {label: outcome} at one size."""
    of_baseline, rows = outcomes[baseline], []
    for label, own in outcomes.items():
        if label == baseline:
            continue
        is_scored = None not in (own['accuracy'], of_baseline['accuracy'])
        rows.append({'label': label, 'parameters': own['parameters'], 'seeds': own['seeds'],
                     'accuracy': own['accuracy'], 'accuracy_of_baseline': of_baseline['accuracy'],
                     'accuracy_gain': 100 * (own['accuracy'] - of_baseline['accuracy']) if is_scored else None,
                     'loss': own['loss'], 'loss_of_baseline': of_baseline['loss'],
                     'loss_gain': own['loss'] - of_baseline['loss']})
    return rows


def plot(rows: list[dict], baseline: str):
    """A line for each method over the sizes: accuracy where it is known, and loss."""
    panels = {'accuracy_gain': 'mean accuracy, percentage points', 'loss_gain': 'validation loss, nats per token'}
    if all(row['accuracy_gain'] is None for row in rows):
        del panels['accuracy_gain']
    labels, sizes = dict.fromkeys(row['label'] for row in rows), list(dict.fromkeys(row['size'] for row in rows))
    figure, all_axes = new_figure(1, len(panels), figsize=(1.5 + 4.5 * len(panels), 4.5), squeeze=False)
    for axes, (key, what) in zip(all_axes[0], panels.items()):
        for label, style in zip(labels, line_styles(len(labels))):
            points = [(sizes.index(row['size']), row[key]) for row in rows
                      if row['label'] == label and row[key] is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], marker='o', label=label, **style)
        axes.axhline(0, color='black', linewidth=0.8)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set(xlabel='parameters', ylabel=what, xlim=(-0.3, len(sizes) - 0.7))
        axes.set_title(f'difference to {baseline}', fontsize='medium')
    figure.legend(*all_axes[0, -1].get_legend_handles_labels(), loc='outside right upper')
    return figure


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('scaling RUN RUN ... --out=NAME', Settings, argv)
        sizes = beside(s.baseline, runs, lambda folders: outcome(folders, s.paper))
        rows = [{'size': size} | row for size, (outcomes, baseline) in sizes.items()
                for row in gains(outcomes, baseline)]
        for row in rows:
            print(f'{row["size"]} {row["label"]}: validation loss {row["loss_gain"]:+.4f}'
                  + ('' if row['accuracy_gain'] is None else f', accuracy {row["accuracy_gain"]:+.2f} points'))
        if any(row['accuracy_gain'] is None for row in rows):
            print(f'accuracy is missing where eval.jsonl lacks a task: python eval.py RUN --paper={s.paper}')
        write_figure(s.out, runs, 'scaling', rows, plot(rows, s.baseline))


if __name__ == '__main__':
    main()
