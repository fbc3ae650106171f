"""Scores of a synthetic task over training, averaged over seeds.

    python -m analysis.scores RUN RUN ... --out=NAME
    python -m analysis.scores RUN RUN ... --out=NAME --bars             final scores

Writes NAME.png and NAME.csv, and prints each final score and when the task was solved. If a task
has several scores, each configuration gets a panel and each score a line: see appendix B of the
Context-Ready paper. Otherwise each configuration is a line. With --bars, each data set (and
score) has a group of bars, one per configuration: the path-star figure of the NextLat paper.
"""
import re
from dataclasses import dataclass

from analysis import figures
from common.files import UserError
from common.runs import read_log, read_run
from data.pointer_chasing import SOLVED


@dataclass
class Settings(figures.Settings):
    scores: tuple[str, ...] = ('accuracy', 'solved', 'valid', 'next_token')  # prefixes of the logged values to draw
    bars: bool = False  # draw the final scores as bars


def score_names(runs: list[str], prefixes: tuple[str, ...]) -> list[str]:
    """Return the names of the first run's logged values that start with one of the prefixes."""
    logged = [name for record in read_log(runs[0]) for name in record]
    names = dict.fromkeys(name for name in logged if name.startswith(prefixes))
    if not names:
        raise UserError(f'{runs[0]} logged nothing that starts with {" or ".join(prefixes)}: was it trained and '
                        'evaluated on a task?')
    return list(names)


def solved_from(points: list[dict]) -> int | None:
    """Return the step from which the mean over seeds stays at SOLVED or above, or None."""
    first = figures.holds_from(points, lambda p: p['mean'] >= SOLVED)
    return first and first['step']


def plot(curves: dict[str, dict[str, list[dict]]]):
    """Draw {label: {score: points}}: a panel per label if there are several scores, else one."""
    names = list(dict.fromkeys(name for scores in curves.values() for name in scores))
    several = len(names) > 1
    panels = {label: {label: scores} for label, scores in curves.items()} if several else {names[0]: curves}
    figure, all_axes = figures.panels('Task scores over training', len(panels), 4, (5, 4), sharex=True, sharey=True)
    styles, lines = {key: style for key, _, style in figures.styled(dict.fromkeys(names if several else curves))}, {}
    for axes, (title, shown) in zip(all_axes, panels.items()):
        for label, scores in shown.items():
            for name, points in scores.items():
                key = name if several else label
                lines[key] = figures.draw_band(axes, [p['step'] for p in points], points, **styles[key])
        axes.set(xlabel='training steps', ylabel='score' if several else title, title=title if several else '')
    all_axes[0].set(xlim=(0, None), ylim=(0, None))
    figure.legend(lines.values(), lines, loc='outside right center', title=figures.BAND)
    return figure


def plot_bars(rows: list[dict]):
    """Draw the final score of each label as a bar, in groups by data set and score."""
    ends = {(row['data'], row['score'], row['label']): row for row in rows}
    groups, labels, scores = (list(dict.fromkeys(key[part] for key in ends)) for part in (slice(2), 2, 1))
    width = 0.8 / len(labels)
    figure, axes = figures.new_figure('Final task scores', figsize=(3 + (0.8 + 0.3 * len(labels)) * len(groups), 4.5))
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


def print_ends(curves: dict[str, dict[str, list[dict]]], data: str) -> None:
    """Print each final score and when it was solved. data: printed before the label if not ''."""
    for label, scores in curves.items():
        print(f'{data}, {label}' if data else label)
        for name, points in scores.items():
            end, step = points[-1], solved_from(points)
            verdict = ''  # a loss
            if any(score in name for score in Settings.scores):  # rnn_accuracy_1, too
                verdict = ', not solved' if step is None else f', at least {SOLVED} from step {step:,} on'
            print(f'  {name}: {end["mean"]:.3f} ({end["lowest"]:.3f} to {end["highest"]:.3f}, '
                  f'seeds: {end["seeds"]}) after {end["step"]:,} steps{verdict}')


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('scores RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        parts, rows = {}, []
        for run in runs:
            parts.setdefault(read_run(run)['settings']['data'] if s.bars else '', []).append(run)

        def scores_of(folders):
            folders = figures.finished(folders) if s.bars else folders  # unfinished runs have no final score
            return {name: figures.curve(folders, name, name) for name in score_names(folders, s.scores)}
        for data, part in parts.items():
            curves = figures.curves_of(part, scores_of, labels=s.labels)
            rows += [({'data': data} if s.bars else {}) | {'label': label, 'score': name} | p
                     for label, scores in curves.items() for name, points in scores.items() for p in points]
            print_ends(curves, data)
        figures.write_figure(s.out, runs, 'scores', rows, plot_bars(rows) if s.bars else plot(curves))


if __name__ == '__main__':
    main()
