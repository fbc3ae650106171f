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

from analysis.figures import draw_band, line_styles, new_figure, output_path, save_figure, write_csv
from analysis.loss_curves import curve, curves_of
from common.files import UserError, friendly_errors
from common.runs import read_log
from common.settings import load_settings
from data.pointer_chasing import SOLVED


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: scores beside the runs
    scores: str = 'accuracy,solved,valid,next_token'  # which: the logged values whose names begin with one of these


def score_names(runs: list[str], prefixes: str) -> list[str]:
    """The names of logged values of the first run that begin with one of prefixes, as they stand in its log."""
    logged = [name for record in read_log(runs[0]) for name in record]
    names = dict.fromkeys(name for name in logged if name.startswith(tuple(prefixes.split(','))))
    if not names:
        raise UserError(f'{runs[0]} logged nothing that begins with {prefixes!r}: was it trained on a task, and '
                        'evaluated?')
    return list(names)


def solved_from(points: list[dict]) -> int | None:
    """The step from which on the mean stays at SOLVED or above, or None."""
    step = None
    for p in points:
        if p['mean'] < SOLVED:
            step = None
        elif step is None:
            step = p['step']
    return step


def plot(curves: dict[str, dict[str, list[dict]]], path) -> None:
    """curves {label: {score: points}}: a panel for each label if there are several scores, else one for all."""
    names = list(dict.fromkeys(name for scores in curves.values() for name in scores))
    several = len(names) > 1
    panels = {label: {label: scores} for label, scores in curves.items()} if several else {names[0]: curves}
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, all_axes = new_figure(rows, columns, figsize=(2 + 4.5 * columns, 0.5 + 3.8 * rows), squeeze=False,
                                  sharex=True, sharey=True)
    ordered = score_colours(names) if several else {}
    styles = dict(zip(curves, line_styles(len(curves))))
    lines = {}
    for axes, (title, shown) in zip(all_axes.flat, panels.items()):
        for label, scores in shown.items():
            for name, points in scores.items():
                style = ordered[name] if several else styles[label]
                steps = [p['step'] for p in points]
                lines[name if several else label] = draw_band(axes, steps, points, marker='o', markersize=2.5, **style)
        axes.set(xlabel='steps', ylabel='score' if several else title)
        axes.set_title(title if several else '', fontsize='medium')
        axes.tick_params(labelleft=True, labelbottom=True)  # on shared axes too
        axes.grid(alpha=0.3)
    all_axes[0, 0].set(xlim=(0, None), ylim=(0, None))
    for axes in all_axes.flat[len(panels):]:
        axes.set_axis_off()
    figure.legend(lines.values(), lines, loc='outside right upper', frameon=False)
    save_figure(figure, path)


def score_colours(names: list[str]) -> dict[str, dict]:
    """{score: its style}, light to dark in the order of the names, as of levels."""
    import matplotlib
    shades = matplotlib.colormaps['viridis']
    return {name: {'color': shades(0.9 * i / max(1, len(names) - 1))} for i, name in enumerate(names)}


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if not runs:
            raise UserError('which runs? python -m analysis.scores RUN RUN ... --out=NAME')
        curves = curves_of(runs, lambda folders: {name: curve(folders, name, name)
                                                  for name in score_names(folders, s.scores)})
        out = output_path(s.out, runs, 'scores')
        rows = [{'label': label, 'score': name} | p
                for label, scores in curves.items() for name, points in scores.items() for p in points]
        write_csv(f'{out}.csv', rows)
        plot(curves, f'{out}.png')
        for label, scores in curves.items():
            print(label)
            for name, points in scores.items():
                end, step = points[-1], solved_from(points)
                verdict = 'not solved' if step is None else f'{SOLVED} and more from step {step:,} on'
                print(f'  {name}: {end["mean"]:.3f} ({end["lowest"]:.3f} to {end["highest"]:.3f}, '
                      f'seeds: {end["seeds"]}) after {end["step"]:,} steps, {verdict}')
        print(f'written to {out}.png and {out}.csv')


if __name__ == '__main__':
    main()
