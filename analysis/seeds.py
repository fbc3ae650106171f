"""Significance tests of final validation losses: figure 6 and appendix C of the SPS paper.

    python -m analysis.seeds RUN RUN ... --out=NAME

Runs that differ only in the seed form a group. Writes NAME.png and NAME.csv (the mean of each group
with its 95% interval by Student's t, +-4.303 standard errors for three seeds), and NAME_tests.csv:

* one-sided t-tests that `better` has a lower loss than each other group;
* TOST: two one-sided tests that the `alike` groups differ by less than `margin`; p is the larger.

All are Welch's tests, which do not assume equal variances.
"""
import statistics
import sys
from dataclasses import dataclass

from analysis import figures
from common.files import UserError
from common.settings import check_ranges


@dataclass
class Settings(figures.Settings):
    better: str | None = None  # label of the group that is tested to have the lower loss; None: sps, if it is there
    alike: str | None = None  # labels of two groups tested for equivalence, separated by ;; None: as in the paper
    margin: float = 0.01  # nats per token within which they count as equal

    def __post_init__(self):
        check_ranges(self, margin=0)
        if self.alike is not None and len(self.alike.split(';')) != 2:
            raise UserError(f"alike is {self.alike!r}: expected two labels separated by ;, such as 'delayed_state;sps'")


def tests(losses: dict[str, list[float]], s: Settings) -> list[dict]:
    """Return the rows of NAME_tests.csv. losses: {label: one loss per seed}."""
    tested, rows = {label: values for label, values in losses.items() if len(set(values)) > 1}, []
    better, (a, b) = s.better or 'sps', (s.alike or 'delayed_state;two_x_memory').split(';')
    asked = {s.better, *(s.alike or '').split(';')} - {None, ''}
    for label in sorted(asked - tested.keys()):
        print(f'no test of {label!r}: labels with several seeds: {"; ".join(tested) or "none"}', file=sys.stderr)
    if better in tested:
        rows += [{'test': 'Welch, one-sided: a is lower', 'a': better, 'b': other}
                 | figures.lower_test(tested[better], values) for other, values in tested.items() if other != better]
    if a in tested and b in tested:
        rows.append({'test': f'TOST: equal within {s.margin:g}', 'a': a, 'b': b}
                    | figures.equivalence_test(tested[a], tested[b], s.margin))
    return rows


def plot(groups: list[dict], losses: dict[str, list[float]]):
    """Draw each group's losses as dots, with their mean and its interval."""
    figure, axes = figures.new_figure('Final validation loss over seeds', figsize=(2.5 + 1.4 * len(groups), 4.5))
    for i, row in enumerate(groups):
        values, color = losses[row['label']], f'C{i % 10}'
        axes.plot([i + 0.12] * len(values), values, 'o', markersize=3, color=color, alpha=0.6)
        half = None if row['low'] is None else row['high'] - row['mean']
        axes.errorbar(i, row['mean'], half, fmt='D', markersize=5, capsize=6, color=color)
    axes.set_xticks(range(len(groups)), [row['label'].replace(', ', '\n') for row in groups])
    axes.set(xlim=(-0.6, len(groups) - 0.4), xlabel='configuration', ylabel='final validation loss, nats per token')
    axes.set_title('diamond: mean with 95% interval; dots: seeds')
    return figure


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('seeds RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        losses = figures.curves_of(runs, figures.final_losses, labels=s.labels)
        rows = tests(losses, s)
        groups = []
        for label, values in losses.items():
            low, high = figures.interval(values)
            groups.append({'label': label, 'seeds': len(values), 'mean': statistics.mean(values), 'low': low,
                           'high': high, 'losses': ' '.join(map(repr, values))})
            bounds = '' if low is None else f', 95% interval {figures.interval_text(low, high)}'
            print(f'{label}: {statistics.mean(values):.4f}{bounds} (seeds: {len(values)})')
        for row in rows:
            print(f'{row["test"]}: a = {row["a"]}, b = {row["b"]}: a - b {row["gap"]:+.4f}, t {row["t"]:.2f}, '
                  f'{row["degrees"]:.2f} degrees of freedom, p {row["p"]:.2g}')
        figures.write_figure(s.out, runs, 'seeds', groups, plot(groups, losses))
        if rows:
            figures.write_csv(f'{figures.output_path(s.out, runs, "seeds")}_tests.csv', rows)


if __name__ == '__main__':
    main()
