"""Significance tests of final validation losses: figure 6 and appendix C of the SPS paper.

    python -m analysis.seeds RUN RUN ... --out=NAME --better=A --alike='B;C'

Runs that differ only in the seed form a group. Writes NAME.png and NAME.csv (the mean of each group
with its 95% interval by Student's t, +-4.303 standard errors for three seeds), and NAME_tests.csv:

* one-sided t-tests that `better` has a lower loss than each other group;
* TOST: two one-sided tests that the `alike` groups differ by less than `margin`; p is the larger.

All are Welch's tests, which do not assume equal variances.
"""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from analysis import figures
from analysis.runs import curves_of, finished
from lm_architectures.files import UserError
from lm_architectures.settings import check_ranges


@dataclass
class Settings(figures.Settings):
    better: str | None = None  # label of the group that is tested to have the lower loss
    alike: str | None = None  # labels of two groups tested for equivalence, separated by ;
    margin: float = 0.01  # nats per token within which they count as equal

    def __post_init__(self):
        check_ranges(self, margin=0)


def lower_test(a: Sequence[float], b: Sequence[float], lead: float = 0.0) -> dict[str, float]:
    """Test mean(a) < mean(b) + lead by Welch's t-test. Returns {'gap', 't', 'degrees', 'p'}."""
    from scipy import stats
    found = stats.ttest_ind([x - lead for x in a], b, equal_var=False, alternative='less')
    return {'gap': statistics.mean(a) - statistics.mean(b), 't': found.statistic, 'degrees': found.df,
            'p': found.pvalue}


def equivalence_test(a: Sequence[float], b: Sequence[float], margin: float) -> dict[str, float]:
    """Test equality within a margin (TOST). Returns the one-sided test with the larger p."""
    worse = max(lower_test(a, b, margin), lower_test(b, a, margin), key=lambda side: side['p'])
    return worse | {'gap': statistics.mean(a) - statistics.mean(b)}


def tests(losses: dict[str, list[float]], s: Settings) -> list[dict]:
    """Return the rows of NAME_tests.csv. losses: {label: one loss per seed}."""
    tested, rows = {label: values for label, values in losses.items() if len(set(values)) > 1}, []
    alike = s.alike.split(';') if s.alike else []
    for label in {s.better, *alike} - {None}:
        if label not in tested:
            raise UserError(f'no test of {label!r}: labels with several seeds: {"; ".join(tested) or "none"}')
    if s.better:
        rows += [{'test': 'Welch, one-sided: a is lower', 'a': s.better, 'b': other}
                 | lower_test(tested[s.better], values) for other, values in tested.items() if other != s.better]
    if alike:
        if len(alike) != 2:
            raise UserError(f"alike is {s.alike!r}: expected two labels separated by ;, such as 'A;B'")
        a, b = alike
        rows.append({'test': f'TOST: equal within {s.margin:g}', 'a': a, 'b': b}
                    | equivalence_test(tested[a], tested[b], s.margin))
    return rows


def plot(groups: list[dict], losses: dict[str, list[float]]):
    """Draw each group's losses as dots, with their mean and its interval."""
    figure, (axes,) = figures.new_figure('Final validation loss over seeds', size=(2.5 + 1.4 * len(groups), 4.5))
    for i, row in enumerate(groups):
        values, color = losses[row['label']], f'C{i}'
        axes.plot([i + 0.12] * len(values), values, 'o', markersize=3, color=color, alpha=0.6)
        half = None if row['low'] is None else row['high'] - row['mean']
        axes.errorbar(i, row['mean'], half, fmt='D', markersize=5, capsize=6, color=color)
    axes.set_xticks(range(len(groups)), [row['label'].replace(', ', '\n') for row in groups])
    axes.set(xlim=(-0.6, len(groups) - 0.4), xlabel='configuration', ylabel='final validation loss, nats per token')
    axes.set_title('diamond: mean with 95% interval; dots: seeds')
    return figure


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    losses = curves_of(runs, lambda own: [run.final_loss() for run in finished(own)], labels=s.labels)
    groups = [{'label': label, 'seeds': len(values), **figures.mean_and_interval(values),
               'losses': ' '.join(map(repr, values))} for label, values in losses.items()]
    rows = tests(losses, s)
    figures.show(groups, 'label', 'seeds', 'mean', 'low', 'high')
    if rows:
        figures.show(rows)
    return {'.csv': groups, '.png': plot(groups, losses)} | ({'_tests.csv': rows} if rows else {})


if __name__ == '__main__':
    main()
