"""What a method gains over the baseline, by size: figure 3 of the SPS paper.

    python eval.py RUN RUN ... --paper=sps
    python -m analysis.scaling RUN RUN ... --out=NAME

At each size, beside the runs of `baseline`: the difference of the mean accuracy (percentage points, from eval.jsonl)
and of the final validation loss. Seeds are averaged. Runs are of one size if their numbers of parameters are within 10%
of each other. Writes NAME.png and NAME.csv.
"""
import statistics
from dataclasses import dataclass
from pathlib import Path

from analysis import figures
from eval import PAPERS


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: scaling beside the runs
    baseline: str = 'standard'  # label of what the others are compared with


def outcome(runs: list[str]) -> dict:
    """Return {'parameters', 'seeds', 'loss', 'accuracy'}, means over the `finished` of runs that differ in the seed.

    Accuracy (0 to 1) is None unless all the paper's tasks were evaluated for all of them.
    """
    runs = figures.finished(runs)
    results = [figures.evaluations(Path(run) / 'eval.jsonl') for run in runs]
    accuracies = [of_run.get(f'{task} {metric}') for of_run in results for task, metric in PAPERS['sps'][0].items()]
    return {'parameters': figures.n_parameters(runs[0]), 'seeds': len(runs),
            'loss': statistics.mean(map(figures.final_loss, runs)),
            'accuracy': None if None in accuracies else statistics.mean(accuracies)}


def gains(outcomes: dict[str, dict], baseline: str) -> list[dict]:
    """Return a row for each group except the baseline, of {label: outcome} at one size."""
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
    """Draw a line for each method over the sizes: accuracy where it is known, and loss."""
    panels = {'accuracy_gain': 'mean accuracy, percentage points', 'loss_gain': 'validation loss, nats per token'}
    sizes = list(dict.fromkeys(row['size'] for row in rows))
    figure, all_axes = figures.new_figure(1, len(panels), figsize=(10.5, 4.5))
    for axes, (key, what) in zip(all_axes, panels.items()):
        for label, own, style in figures.styled(figures.by_label(rows)):
            known = [row for row in own if row[key] is not None]
            axes.plot([sizes.index(row['size']) for row in known], [row[key] for row in known], marker='o',
                      label=label, **style)
        axes.axhline(0, color='black', linewidth=0.8)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set(xlabel='parameters', ylabel=what, xlim=(-0.3, len(sizes) - 0.7))
        axes.set_title(f'difference to {baseline}', fontsize='medium')
    figure.legend(*all_axes[-1].get_legend_handles_labels(), loc='outside right upper')
    return figure


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('scaling RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        sizes = figures.beside(s.baseline, runs, outcome)
        rows = [{'size': size} | row for size, outcomes in sizes.items() for row in gains(outcomes, s.baseline)]
        for row in rows:
            print(f'{row["size"]} {row["label"]}: validation loss {row["loss_gain"]:+.4f}'
                  + ('' if row['accuracy_gain'] is None else f', accuracy {row["accuracy_gain"]:+.2f} points'))
        if any(row['accuracy_gain'] is None for row in rows):
            print('accuracy is missing where eval.jsonl lacks a task: python eval.py RUN --paper=sps')
        figures.write_figure(s.out, runs, 'scaling', rows, plot(rows, s.baseline))


if __name__ == '__main__':
    main()
