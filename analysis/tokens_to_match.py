"""After how many tokens one method has the loss of another, both at the constant learning rate.

    python -m analysis.tokens_to_match RUN RUN ... --out=NAME

Figures 1 and 2 of the SPS paper, for each method beside `baseline`, at each size:

* figure 1: the tokens of the baseline's first evaluation at or below the method's last loss before its decay (SPS at
  18B tokens), over 18B. 2.6 times at XL in the paper;
* figure 2, the other way round: the tokens of the method at the baseline's last loss before the decay.

Runs that differ only in length and seed are one curve: the shortest one up to its decay, then the longer ones'
evaluations beyond that point, up to theirs. Standard's run of 20B tokens and one planned for 100B are read as 0 to 18B,
then 18B to 90B. The loss to match is that of the shortest run. Writes NAME.png and NAME.csv.
"""
from dataclasses import dataclass

from analysis import figures
from analysis.loss_curves import set_axes
from common.files import UserError
from common.runs import last_before_decay

LENGTH = frozenset({'max_tokens', 'schedule', 'decay_fraction', 'min_lr'})  # what comes after the constant rate


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: tokens_to_match beside the runs
    baseline: str = 'standard'  # label of what the others are compared with


@dataclass
class Curve:
    """Evaluations at the constant learning rate, points as of `figures.curve`."""
    points: list[dict]
    budget: int  # tokens at which the shortest run's decay begins
    last: dict  # the shortest run's last point


def constant_rate(runs: list[str]) -> Curve:
    """Return the curve of runs that differ only in length and seed; UserError if one has no constant rate."""
    by_length = {}
    for run in runs:
        by_length.setdefault(figures.settings_of(run).max_tokens, []).append(run)
    points, ends = [], []
    for _, same_length in sorted(by_length.items()):
        s = figures.settings_of(same_length[0])
        if s.schedule == 'cosine':
            raise UserError(f'{same_length[0]} has schedule = cosine, without a constant learning rate: use wsd or '
                            'constant')
        is_wsd = s.schedule == 'wsd'
        before = int(s.max_tokens * (1 - s.decay_fraction)) if is_wsd else s.max_tokens
        points += [p for p in figures.curve(same_length) if (not ends or p['tokens'] > ends[-1][0])
                   and p['tokens'] >= s.warmup_tokens and (not is_wsd or p['step'] <= last_before_decay(s))]
        if not points:
            raise UserError(f'{same_length[0]}: no evaluation between its warm-up and its decay')
        ends.append((before, points[-1]))
    return Curve(points, *ends[0])


def match(target: str, by: str, curves: dict[str, Curve]) -> dict:
    """Return a row: where the curve `by` first has the target's last loss, None if it has not."""
    last, budget = curves[target].last, curves[target].budget
    found = next((p for p in curves[by].points if p['mean'] <= last['mean']), {})
    return {'loss_of': target, 'loss': last['mean'], 'evaluated_at': last['tokens'], 'budget': budget, 'by': by,
            'searched': curves[by].points[-1]['tokens'], 'reached': found.get('mean'), 'tokens': found.get('tokens'),
            'tokens_ratio': found['tokens'] / budget if found else None}


def plot(sizes: dict[str, dict[str, Curve]], rows: list[dict]):
    """Draw a panel for each size: the curves, and an arrow from each loss to where it is reached."""
    figure, panels = figures.new_figure(1, len(sizes), figsize=(2 + 5 * len(sizes), 5), squeeze=False)
    labels = dict.fromkeys(label for curves in sizes.values() for label in curves)
    styles, lines = dict(zip(labels, figures.line_styles(len(labels)))), {}
    for axes, (size, curves) in zip(panels[0], sizes.items()):
        for label, c in curves.items():
            lines[label] = figures.draw_band(axes, [p['tokens'] for p in c.points], c.points, **styles[label])
        reached = [row for row in rows if row['size'] == size and row['tokens']]
        for row in reached:
            axes.annotate('', (row['tokens'], row['loss']), (row['evaluated_at'], row['loss']),
                          arrowprops={'arrowstyle': '->', 'color': styles[row['by']]['color']})
        set_axes(axes, [c.points for c in curves.values()], 'tokens of training, at the constant rate')
        axes.set_title(f'{size} parameters', fontsize='medium')
    figure.legend(lines.values(), lines, loc='outside lower center', ncols=min(4, len(lines)))
    return figure


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('tokens_to_match RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        sizes = figures.beside(s.baseline, runs, constant_rate, LENGTH)
        rows = [{'size': size} | match(target, by, curves) for size, curves in sizes.items() for other in curves
                if other != s.baseline for target, by in ((other, s.baseline), (s.baseline, other))]
        for row in rows:
            tokens = figures.short_number(row['tokens'] or row['searched'])
            found = (f'has it at {tokens} tokens: {row["tokens_ratio"]:.3f} times the tokens' if row['tokens']
                     else f'does not have it within {tokens} tokens')
            print(f'{row["size"]}: {row["loss_of"]} has {row["loss"]:.4f} before its decay, which begins at '
                  f'{figures.short_number(row["budget"])} tokens; {row["by"]} {found}')
        figures.write_figure(s.out, runs, 'tokens_to_match', rows, plot(sizes, rows))


if __name__ == '__main__':
    main()
