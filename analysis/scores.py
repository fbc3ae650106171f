"""Scores of a synthetic task over training, averaged over seeds.

    python -m analysis.scores RUN RUN ... --out=NAME
    python -m analysis.scores RUN RUN ... --out=NAME --bars             final scores
    python -m analysis.scores RUN RUN ... --scores=nll,tokens_per_s     anything else that is logged

Writes NAME.png and NAME.csv, and prints each final score and when the task was solved. If a task
has several scores, each configuration gets a panel and each score a line: see appendix B of the
Context-Ready paper. Otherwise each configuration is a line. With --bars, each data set (and
score) has a group of bars, one per configuration: the path-star figure of the NextLat paper.
"""
import re
from dataclasses import dataclass

from analysis import figures
from analysis.runs import curve, curves_of, finished, holds_from
from common.files import UserError
from data.pointer_chasing import SOLVED


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
    if not any(score in name for score in Settings.scores):  # a loss; rnn_accuracy_1 is a score, too
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


def plot_bars(rows: list[dict]):
    """Draw the final score of each label as a bar, in groups by data set and score."""
    ends = {(row['data'], row['score'], row['label']): row for row in rows}
    groups, labels, scores = (list(dict.fromkeys(key[part] for key in ends)) for part in (slice(2), 2, 1))
    width = 0.8 / len(labels)
    figure, (axes,) = figures.new_figure('Final task scores', size=(3 + (0.8 + 0.3 * len(labels)) * len(groups), 4.5))
    for i, label in enumerate(labels):
        bars = {g - 0.4 + (i + 0.5) * width: ends[(*group, label)] for g, group in enumerate(groups)
                if (*group, label) in ends}  # {x: row}
        means = [row['mean'] for row in bars.values()]
        to_seeds = [[abs(row[end] - row['mean']) for row in bars.values()] for end in ('lowest', 'highest')]
        axes.bar(list(bars), means, width, yerr=to_seeds, capsize=3, label=label)
    several = len(scores) > 1
    axes.set_xticks(range(len(groups)), ['\n'.join(re.split('[:,]', data) + [score] * several)
                                         for data, score in groups])
    axes.set(xlabel='data set', ylabel='score' if several else scores[0])
    figure.legend(loc='outside right center', title='Bar: mean over seeds\nError bar: lowest to highest seed')
    return figure


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    def scores_of(own):
        own = finished(own) if s.bars else own  # unfinished runs have no final score
        return {name: curve(own, name) for name in score_names(own[0], s.scores)}
    parts, rows, ends = {}, [], []
    for run in runs:
        parts.setdefault(run.record['settings']['data'] if s.bars else '', []).append(run)
    for data, part in parts.items():
        for label, scores in curves_of(part, scores_of, labels=s.labels).items():
            for name, points in scores.items():
                own = ({'data': data} if s.bars else {}) | {'label': label, 'score': name}
                rows += [own | p for p in points]
                ends.append(rows[-1] | {'solved from': solved_from(name, points)})
    figures.show(ends, *own, 'mean', 'lowest', 'highest', 'seeds', 'step', 'solved from')
    return {'.csv': rows, '.png': plot_bars(rows) if s.bars else plot(rows)}


if __name__ == '__main__':
    main()
