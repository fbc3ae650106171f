"""Scores of a synthetic task over training, averaged over seeds.

    python -m analysis.scores RUN RUN ... --out=NAME
    python -m analysis.scores RUN RUN ... --out=NAME --bars             final scores
    python -m analysis.scores RUN RUN ... --scores=nll,tokens_per_s     anything else that is logged

Writes NAME.png and NAME.csv, and prints each final score and when the task was solved. If a task
has several scores, each configuration gets a panel and each score a line: see appendix B of the
Context-Ready paper. Otherwise each configuration is a line. With --bars, each data set (and
score) has a group of bars, one per configuration: the path-star figure of the NextLat paper.
"""
from dataclasses import dataclass

from analysis import figures
from analysis.runs import curve, curves_of, finished, group_by, holds_from
from lm_architectures.data.generated import SOLVED
from lm_architectures.files import UserError


@dataclass
class Settings(figures.Settings):
    scores: tuple[str, ...] = ('accuracy', 'solved', 'valid', 'next_token')  # prefixes of the logged values to draw
    bars: bool = False  # draw the final scores as bars


def score_names(run, prefixes: tuple[str, ...]) -> list[str]:
    """Return the names of a run's logged values that start with one of the prefixes."""
    logged = [name for record in run.log for name in record]
    names = dict.fromkeys(name for name in logged if name.startswith(prefixes))
    if not names:
        raise UserError(f'{run} logged nothing that starts with {" or ".join(prefixes)}: was it trained and '
                        'evaluated on a task?')
    return list(names)


def solved_from(name: str, points: list[dict]) -> int | None:
    """Return the step from which a score's mean over seeds stays at SOLVED or above, or None."""
    if name == 'levels_solved' or not any(score in name for score in Settings.scores):  # a count; a loss
        return None
    first = holds_from(points, lambda p: p['mean'] >= SOLVED)
    return first and first['step']


def plot(rows: list[dict]):
    """Draw the scores over training: a panel per label if there are several scores, else one."""
    names = list(dict.fromkeys(row['score'] for row in rows))
    shown = {names[0]: rows}
    if several := len(names) > 1:
        shown = {label: [row | {'label': row['score']} for row in own] for label, own in figures.by_label(rows).items()}
    figure, all_axes = figures.new_figure('Task scores over training', len(shown), (5, 4), sharex=True, sharey=True)
    style_of = figures.styles(names if several else [row['label'] for row in rows])
    for axes, (title, own) in zip(all_axes, shown.items()):
        figures.draw(axes, own, 'step', style_of=style_of)
        axes.set(xlabel='training steps', ylabel='score' if several else title, title=title if several else '')
    all_axes[0].set(xlim=(0, None), ylim=(0, None))
    figures.add_legend(figure, figures.BAND)
    return figure


def plot_bars(ends: list[dict]):
    """Draw the final score of each label as a bar, in groups by data set and score."""
    import pandas as pd
    labels = list(dict.fromkeys(row['label'] for row in ends))
    table = pd.DataFrame(ends).pivot_table(['mean', 'lowest', 'highest'], ['data', 'score'], 'label', sort=False)
    mean, lowest, highest = (table[column][labels] for column in ('mean', 'lowest', 'highest'))
    figure, (axes,) = figures.new_figure('Final task scores', size=(3 + (0.8 + 0.3 * len(labels)) * len(mean), 4.5))
    to_seeds = [[mean[label] - lowest[label], highest[label] - mean[label]] for label in labels]
    mean.plot.bar(ax=axes, yerr=to_seeds, width=0.8, capsize=3, rot=0, legend=False, xlabel='data set', ylabel='score')
    axes.set_xticklabels('\n'.join([*data.replace(':', ',').split(','), score]) for data, score in mean.index)
    figures.add_legend(figure, 'Bar: mean over seeds\nError bar: lowest to highest seed')
    return figure


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    def scores_of(own):
        own = finished(own) if s.bars else own  # unfinished runs have no final score
        return {name: curve(own, name) for name in score_names(own[0], s.scores)}
    rows, ends = [], []
    for data, part in group_by(runs, lambda run: run.record['settings']['data'] if s.bars else None).items():
        for label, scores in curves_of(part, scores_of, labels=s.labels).items():
            for name, points in scores.items():
                line = ({'data': data} if s.bars else {}) | {'label': label, 'score': name}
                rows += [line | point for point in points]
                ends.append(rows[-1] | {'solved from': solved_from(name, points)})
    figures.show(ends, *line, 'mean', 'lowest', 'highest', 'seeds', 'step', 'solved from')
    return {'.csv': rows, '.png': plot_bars(ends) if s.bars else plot(rows)}


if __name__ == '__main__':
    main()
