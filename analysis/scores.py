"""The exact scores of a synthetic task over training steps, runs that differ only in the seed averaged.

    python -m analysis.scores RUN RUN ... --out=NAME

Writes NAME.png and NAME.csv. Where a task has several scores, as pointer chasing has an accuracy for each level, each
configuration gets a panel and each score a line: the wave of appendix B of the Context-Ready paper. Where it has one,
as path-star graphs have, each configuration is a line, with a band from the lowest to the highest seed. Prints where
each score ends and when it is solved.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import sys
from dataclasses import dataclass

from analysis import write_csv
from analysis.loss_curves import curve, group
from common.files import UserError, friendly_errors
from common.runs import read_log
from common.settings import load_settings

SOLVED = 0.99  # as data/pointer_chasing.py counts


@dataclass
class Settings:
    out: str = 'scores'  # NAME of the files to write, without ending
    scores: str = 'accuracy'  # which: the logged values whose names begin with this


def score_names(runs: list[str], prefix: str) -> list[str]:
    """The names of logged values of the first run that begin with prefix, as they stand in its log."""
    logged = [name for record in read_log(runs[0]) for name in record]
    names = dict.fromkeys(name for name in logged if name.startswith(prefix))
    if not names:
        raise UserError(f'{runs[0]} logged nothing that begins with {prefix!r}: was it trained on a task, and '
                        'evaluated?')
    return list(names)


def solved_from(points: list[dict]) -> int | None:
    """The step from which on the mean stays at 0.99 or above, or None."""
    step = None
    for p in points:
        if p['mean'] < SOLVED:
            step = None
        elif step is None:
            step = p['step']
    return step


def plot(curves: dict[str, dict[str, list[dict]]], path) -> None:
    """curves {label: {score: points}}."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    several = max(map(len, curves.values())) > 1
    panels = len(curves) if several else 1
    figure, all_axes = plt.subplots(1, panels, figsize=(1.5 + 5 * panels, 4.5), sharey=True, squeeze=False,
                                    layout='constrained')
    for i, (label, scores) in enumerate(curves.items()):
        axes = all_axes[0, i if several else 0]
        for j, (name, points) in enumerate(scores.items()):
            steps = [p['step'] for p in points]
            colour = plt.cm.viridis(j / max(1, len(scores) - 1)) if several else None
            line, = axes.plot(steps, [p['mean'] for p in points], color=colour, label=name if several else label,
                              marker='o', markersize=2.5)
            axes.fill_between(steps, [p['lowest'] for p in points], [p['highest'] for p in points], alpha=0.2,
                              color=line.get_color())
        axes.set(xlabel='steps', title=label if several else name)
        axes.title.set_fontsize('small')
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0, -1].legend(fontsize='small', **(dict(loc='upper left', bbox_to_anchor=(1, 1)) if several else {}))
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if not runs:
            raise UserError('which runs? python -m analysis.scores RUN RUN ... --out=NAME')
        curves = {label: {name: curve(folders, name, name) for name in score_names(folders, s.scores)}
                  for label, folders in group(runs).items()}
        rows = [{'label': label, 'score': name} | p
                for label, scores in curves.items() for name, points in scores.items() for p in points]
        write_csv(f'{s.out}.csv', rows)
        plot(curves, f'{s.out}.png')
        for label, scores in curves.items():
            print(label)
            for name, points in scores.items():
                end, step = points[-1], solved_from(points)
                verdict = 'not solved' if step is None else f'{SOLVED} and more from step {step:,} on'
                print(f'  {name}: {end["mean"]:.3f} ({end["lowest"]:.3f} to {end["highest"]:.3f}, '
                      f'{end["seeds"]} seeds) after {end["step"]:,} steps, {verdict}')
        print(f'written to {s.out}.png and {s.out}.csv')


if __name__ == '__main__':
    main()
