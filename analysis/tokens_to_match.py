"""Tokens that one method needs to reach the loss of another, both at the constant learning rate.

    python -m analysis.tokens_to_match RUN RUN ... --out=NAME

Figures 1 and 2 of the SPS paper, for each method and the baseline (the first group), at each size:

* figure 1: the tokens that the baseline needs to reach the method's last loss before its decay (SPS
  at 18B tokens), divided by 18B. In the paper, 2.6 at XL;
* figure 2: the tokens that the method needs to reach the baseline's last loss before its decay.

Runs that differ only in length and seed form one curve: the shortest run up to its decay, then the
longer runs up to their decay. For example, Standard's runs of 20B and 100B tokens cover 0 to 18B
and 18B to 90B. The loss to match is the shortest run's. Writes NAME.png and NAME.csv.
"""
from dataclasses import dataclass

from analysis import figures
from analysis.loss_curves import set_axes
from analysis.runs import curve, curves_by_size, finished, group_by
from lm_architectures.files import UserError

LENGTH = frozenset({'max_tokens', 'schedule', 'decay_fraction', 'min_lr'})  # settings of length and decay


@dataclass
class Curve:
    points: list[dict]  # of `runs.curve`, at the constant learning rate
    budget: int  # tokens at which the shortest run's decay begins
    last: dict  # the shortest run's last point before its decay


def constant_rate(runs: list) -> Curve:
    """Return the Curve of runs that differ only in length and seed, without cosine schedules."""
    by_length = group_by(runs, lambda run: run.settings.max_tokens)
    points, ends = [], []
    for _, same_length in sorted(by_length.items()):
        s = same_length[0].settings
        if s.schedule == 'cosine':
            raise UserError(f'{same_length[0]} has schedule = cosine, without a constant learning rate: expected wsd '
                            'or constant')
        if not ends:  # longer runs may have been stopped
            same_length = finished(same_length)
        is_wsd = s.schedule == 'wsd'
        before = int(s.max_tokens * (1 - s.decay_fraction)) if is_wsd else s.max_tokens
        points += [p for p in curve(same_length) if (not ends or p['tokens'] > ends[-1][0])
                   and p['tokens'] >= s.warmup_tokens and (not is_wsd or p['step'] <= s.last_before_decay)]
        if not points:
            raise UserError(f'{same_length[0]}: no evaluation between warm-up and decay')
        ends.append((before, points[-1]))
    return Curve(points, *ends[0])


def match(target: str, by: str, curves: dict[str, Curve]) -> dict:
    """Return a CSV row: when `by` first reaches the target's last loss (None: never)."""
    last, budget = curves[target].last, curves[target].budget
    found = next((p for p in curves[by].points if p['mean'] <= last['mean']), {})
    return {'loss_of': target, 'loss': last['mean'], 'evaluated_at': last['tokens'], 'budget': budget, 'by': by,
            'searched': curves[by].points[-1]['tokens'], 'reached': found.get('mean'), 'tokens': found.get('tokens'),
            'tokens_ratio': found['tokens'] / budget if found else None}


def plot(sizes: dict[str, dict[str, Curve]], rows: list[dict]):
    """Draw a panel per size: the curves, and an arrow from each loss to where it is matched."""
    figure, panels = figures.new_figure('Tokens to match a loss, at the constant learning rate', len(sizes), (6, 5.5))
    style_of = figures.styles(label for curves in sizes.values() for label in curves)
    for axes, (size, curves) in zip(panels, sizes.items()):
        figures.draw(axes, figures.labeled({label: c.points for label, c in curves.items()}), 'tokens',
                     style_of=style_of)
        reached = [row for row in rows if row['size'] == size and row['tokens']]
        for row in reached:
            axes.annotate('', (row['tokens'], row['loss']), (row['evaluated_at'], row['loss']),
                          arrowprops={'arrowstyle': '->', 'color': style_of[row['by']]['color']})
        set_axes(axes, [c.points for c in curves.values()], 'training tokens')
        axes.set_title(f'{size} parameters')
    figures.add_legend(figure, f'{figures.BAND}\nArrow: from a loss to where the other method matches it',
                       'lower center', ncols=min(4, len(style_of)))
    return figure


@figures.script(figures.Settings)
def main(runs: list, s: figures.Settings) -> dict:
    sizes, rows = curves_by_size(runs, constant_rate, LENGTH, s.labels), []
    for size, curves in sizes.items():
        baseline, *others = curves
        rows += [{'size': size} | match(target, by, curves) for other in others
                 for target, by in ((other, baseline), (baseline, other))]
    figures.show(rows, 'size', 'loss_of', 'loss', 'budget', 'by', 'searched', 'tokens', 'tokens_ratio')
    return {'.csv': rows, '.png': plot(sizes, rows)}


if __name__ == '__main__':
    main()
