"""Significance tests of final validation losses (SPS paper, appendix C).

    python -m papers.sps.seeds RUN RUN ... --better=A --alike='B;C' --out=NAME

Prints and writes to NAME.csv:

* one-sided t-tests that `better` has a lower loss than each other group of seeds;
* TOST: two one-sided tests that the `alike` groups differ by less than `margin`; p is the larger.

All are Welch's tests, which do not assume equal variances. `python -m analysis final` shows the
groups with their intervals (figure 6).
"""
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import pandas as pd

from analysis import figures
from analysis.runs import finished, labeled
from lm_architectures.files import UserError


@dataclass
class Settings(figures.Settings):
    better: str | None = None  # label of the group that is tested to have the lower loss
    alike: str | None = None  # labels of two groups tested for equivalence, separated by ;
    margin: float = 0.01  # nats per token within which they count as equal


def lower_test(a: Sequence[float], b: Sequence[float], lead: float = 0.0) -> dict[str, float]:
    """Test mean(a) < mean(b) + lead by Welch's t-test. Returns {'gap', 't', 'degrees', 'p'}."""
    from scipy import stats
    found = stats.ttest_ind([x - lead for x in a], b, equal_var=False, alternative='less')
    return {'gap': mean(a) - mean(b), 't': found.statistic, 'degrees': found.df, 'p': found.pvalue}


def equivalence_test(a: Sequence[float], b: Sequence[float], margin: float) -> dict[str, float]:
    """Test equality within a margin (TOST). Returns the one-sided test with the larger p."""
    worse = max(lower_test(a, b, margin), lower_test(b, a, margin), key=lambda side: side['p'])
    return worse | {'gap': mean(a) - mean(b)}


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    losses = {label: [*own.loss] for label, own in finished(labeled(runs, s.labels)).groupby('label', sort=False)}
    losses, rows = {label: values for label, values in losses.items() if len({*values}) > 1}, []
    alike = s.alike.split(';') if s.alike else []
    if len(alike) not in (0, 2):
        raise UserError(f"alike is {s.alike!r}: expected two labels separated by ;, such as 'A;B'")
    for label in [label for label in (s.better, *alike) if label not in (None, *losses)]:
        raise UserError(f'no test of {label!r}: labels with several seeds: {"; ".join(losses) or "none"}')
    for other in [label for label in losses if s.better not in (None, label)]:
        rows.append({'test': 'Welch, one-sided: a is lower', 'a': s.better, 'b': other,
                     **lower_test(losses[s.better], losses[other])})
    if alike:
        a, b = alike
        rows.append({'test': f'TOST: equal within {s.margin:g}', 'a': a, 'b': b,
                     **equivalence_test(losses[a], losses[b], s.margin)})
    if not rows:
        raise UserError('which test? --better=A or --alike="B;C", labels of the runs')
    figures.show(rows)
    return {'.csv': pd.DataFrame(rows)}


if __name__ == '__main__':
    main()
