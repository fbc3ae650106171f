"""Accuracy and loss relative to a baseline, by model size: figure 3 of the SPS paper.

    python eval.py RUN RUN ... --paper=sps
    python -m analysis.scaling RUN RUN ... --out=NAME

The baseline is the first group of runs. Accuracy is the mean over the paper's tasks, from
eval.jsonl; loss is the final validation loss.
Runs within 10% of each other's parameter count share a size. Writes NAME.png and NAME.csv.
"""
import statistics

from analysis import figures
from analysis.runs import curves_by_size, finished
from eval import PAPERS


def outcome(runs: list) -> dict:
    """Return {'parameters', 'seeds', 'loss', 'accuracy'}, averaged over the finished seeds.

    Accuracy (0 to 1) is None unless all the paper's tasks were evaluated for every seed.
    """
    runs = finished(runs)
    results = [run.evaluations() for run in runs]
    accuracies = [of_run.get(f'{task} {metric}') for of_run in results for task, metric in PAPERS['sps'][0].items()]
    return {'parameters': runs[0].parameters, 'seeds': len(runs),
            'loss': statistics.mean(run.final_loss() for run in runs),
            'accuracy': None if None in accuracies else statistics.mean(accuracies)}


def gains(outcomes: dict[str, dict]) -> list[dict]:
    """Return a CSV row for each label but the baseline. outcomes: {label: outcome} of one size."""
    (_, of_baseline), *others = outcomes.items()
    rows = []
    for label, own in others:
        is_scored = None not in (own['accuracy'], of_baseline['accuracy'])
        rows.append({'label': label, **own, 'loss_of_baseline': of_baseline['loss'],
                     'loss_difference': own['loss'] - of_baseline['loss'],
                     'accuracy_of_baseline': of_baseline['accuracy'],
                     'accuracy_gain': 100 * (own['accuracy'] - of_baseline['accuracy']) if is_scored else None})
    return rows


def plot(rows: list[dict], baseline: str):
    """Draw a line for each method over the sizes: accuracy where it is known, and loss."""
    panels = {'accuracy_gain': 'mean task accuracy, percentage points',
              'loss_difference': 'validation loss, nats per token'}
    figure, all_axes = figures.new_figure(f'Difference to {baseline}, by model size', 2, (5.25, 4.5))
    for axes, (key, what) in zip(all_axes, panels.items()):
        axes.xaxis.update_units(list(dict.fromkeys(row['size'] for row in rows)))  # in this order for all lines
        figures.draw(axes, rows, 'size', key, markersize=6)
        axes.axhline(0, color='black', linewidth=0.8)
        axes.set(xlabel='model parameters', ylabel=f'difference in {what}')
    figures.add_legend(figure, 'Mean over seeds')
    return figure


@figures.script(figures.Settings)
def main(runs: list, s: figures.Settings) -> dict:
    sizes = curves_by_size(runs, outcome, labels=s.labels)
    rows = [{'size': size} | row for size, outcomes in sizes.items() for row in gains(outcomes)]
    figures.show(rows, 'size', 'label', 'seeds', 'loss_difference', 'accuracy_gain')
    if any(row['accuracy_gain'] is None for row in rows):
        print('no accuracy for runs without all tasks in eval.jsonl: python eval.py RUN --paper=sps')
    return {'.csv': rows, '.png': plot(rows, next(iter(next(iter(sizes.values())))))}


if __name__ == '__main__':
    main()
