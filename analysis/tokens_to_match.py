"""After how many tokens one method has the loss of another, both at the constant learning rate.

    python -m analysis.tokens_to_match RUN RUN ... --out=NAME

Figures 1 and 2 of the SPS paper, for each other method beside `baseline`, at each size:

* figure 1: at how many tokens the baseline has the method's loss. The loss is the method's last one before its decay
  (SPS at 18B tokens); the tokens are those of the baseline's first evaluation at or below it, over 18B. 2.6 times at XL
  in the paper;
* figure 2, the other way round: at how many tokens the method has the baseline's last loss before the decay.

Runs that differ in nothing but their length (and the seed) are one curve: the shortest one up to its decay, then the
longer ones' evaluations beyond that point, up to theirs. So Standard's run of 20B tokens and one planned for 100B are
read as 0 to 18B, then 18B to 90B. The loss to match is always that of the shortest run. Writes NAME.png and NAME.csv.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

from dataclasses import dataclass

from analysis.figures import (
    beside,
    curve,
    line_styles,
    new_figure,
    runs_to_read,
    settings_of,
    short_number,
    write_figure,
)
from analysis.loss_curves import TOKENS, loss_limits, set_loss_axis, unit_for
from common.files import UserError, friendly_errors
from common.run_settings import last_before_decay

LENGTH = frozenset({'max_tokens', 'schedule', 'decay_fraction', 'min_lr'})  # what comes after the constant rate


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: tokens_to_match beside the runs
    baseline: str = 'standard'  # label, or model or method, of what the others are compared with


@dataclass
class Curve:
    """Evaluations at the constant learning rate, points as of `figures.curve`."""
    points: list[dict]
    budget: int  # tokens at which the shortest run's decay begins
    last: dict  # the shortest run's last point


def constant_rate(runs: list[str]) -> Curve:
    """The curve of runs that differ in their length and seed alone. UserError if one never has a constant rate."""
    by_length = {}
    for run in runs:
        by_length.setdefault(settings_of(run).max_tokens, []).append(run)
    points, ends = [], []
    for _, same_length in sorted(by_length.items()):
        s = settings_of(same_length[0])
        if s.schedule == 'cosine':
            raise UserError(f'{same_length[0]} has schedule = cosine, and so no constant learning rate: use runs with '
                            'wsd or constant')
        is_wsd = s.schedule == 'wsd'
        before = int(s.max_tokens * (1 - s.decay_fraction)) if is_wsd else s.max_tokens
        points += [p for p in curve(same_length) if (not ends or p['tokens'] > ends[-1][0])
                   and p['tokens'] >= s.warmup_tokens and (not is_wsd or p['step'] <= last_before_decay(s))]
        if not points:
            raise UserError(f'{same_length[0]}: no evaluation between its warm-up and its decay')
        ends.append((before, points[-1]))
    return Curve(points, *ends[0])


def match(target: str, by: str, curves: dict[str, Curve]) -> dict:
    """A row: where the curve `by` first has the target's last loss; what it has not is None."""
    last, budget = curves[target].last, curves[target].budget
    found = next((p for p in curves[by].points if p['mean'] <= last['mean']), {})
    row = {'loss_of': target, 'loss': last['mean'], 'evaluated_at': last['tokens'], 'budget': budget, 'by': by,
           'searched': curves[by].points[-1]['tokens'], 'reached': found.get('mean')}
    for axis in ('tokens', 'gpu_hours', 'flops'):
        row |= {axis: found.get(axis), f'{axis}_ratio': None}
        if row[axis] and last[axis]:  # what the whole budget costs, which may end a little after the last evaluation
            row[f'{axis}_ratio'] = row[axis] / (last[axis] * budget / last['tokens'])
    return row


def outcome(row: dict) -> str:
    """What `match` found, as text."""
    if row['tokens'] is None:
        return f'has not in {short_number(row["searched"])} tokens'
    text = f'has that at {short_number(row["tokens"])} tokens: {row["tokens_ratio"]:.3f} times the tokens'
    for axis, what in (('gpu_hours', 'GPU-hours'), ('flops', 'FLOPs')):
        if row[f'{axis}_ratio'] is not None:
            text += f', {row[f"{axis}_ratio"]:.3f} times the {what}'
    return text


def plot(sizes: dict[str, dict[str, Curve]], rows: list[dict]):
    """A panel for each size: the curves, and an arrow from each loss to where it is reached."""
    figure, panels = new_figure(1, len(sizes), figsize=(2 + 5 * len(sizes), 5), squeeze=False)
    labels = dict.fromkeys(label for curves in sizes.values() for label in curves)
    styles = dict(zip(labels, line_styles(len(labels))))
    lines = {}
    for axes, (size, curves) in zip(panels[0], sizes.items()):
        unit, name = unit_for(max(c.points[-1]['tokens'] for c in curves.values()), TOKENS)
        for label, c in curves.items():
            lines[label], = axes.plot([p['tokens'] / unit for p in c.points], [p['mean'] for p in c.points],
                                      marker='o' if len(c.points) <= 40 else None, markersize=3, **styles[label])
        reached = [row for row in rows if row['size'] == size and row['tokens']]
        for row in reached:
            axes.annotate('', (row['tokens'] / unit, row['loss']), (row['evaluated_at'] / unit, row['loss']),
                          arrowprops={'arrowstyle': '->', 'color': styles[row['by']]['color']})
        texts = [f'{row["by"]} has the loss of {row["loss_of"]} at {row["tokens_ratio"]:.2f} x its tokens'
                 for row in reached]
        axes.text(0.98, 0.97, '\n'.join(texts), transform=axes.transAxes, ha='right', va='top', fontsize='small')
        set_loss_axis(axes, *loss_limits([c.points for c in curves.values()]))
        axes.set(xlabel=f'{name} of training, at the constant rate', xlim=(0, None))
        axes.set_title(f'{size} parameters', fontsize='medium')
    figure.legend(lines.values(), lines, loc='outside lower center', ncols=min(4, len(lines)))
    return figure


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('tokens_to_match RUN RUN ... --out=NAME', Settings, argv)
        sizes = beside(s.baseline, runs, constant_rate, LENGTH)
        rows = [{'size': size} | match(target, by, curves) for size, (curves, baseline) in sizes.items()
                for other in curves if other != baseline for target, by in ((other, baseline), (baseline, other))]
        for row in rows:
            print(f'{row["size"]}: {row["loss_of"]} has {row["loss"]:.4f} before its decay, which begins at '
                  f'{short_number(row["budget"])} tokens; {row["by"]} {outcome(row)}')
        write_figure(s.out, runs, 'tokens_to_match', rows,
                     plot({size: curves for size, (curves, _) in sizes.items()}, rows))


if __name__ == '__main__':
    main()
