"""Test the headline claims of the four papers on small models, over several seeds.

    python -m analysis.claims --list                        list the claims and the papers' numbers
    python -m analysis.claims --out_dir=out/claims          train the models and test the claims
    python -m analysis.claims --only=sps,gpn_memory         only a paper's claims, or some by name

Claims are rows of claims.csv, runs are rows of claims_runs.csv (see docs/evaluation.md). A side
`FILE: MODEL` of a claim is a row of a comparison in bench/results, written by analysis.compare.

A claim is tested if its runs can find an effect of the paper's size, or if it was named before they
ran; others are described. Tests are
two-sided t-tests of the differences by seed, corrected by Holm's method for the number of the
paper's tests. `smallest` is the effect that such a test finds with a probability of 80%, given the
differences' standard deviation `sd`. Writes a claims.csv with the numbers of each seed, and
claims.md, to out_dir.
"""
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from analysis import figures
from analysis.compare import Method, set_best_rates, train_seeds
from analysis.figures import read_csv
from analysis.runs import Run
from analysis.scores import score_names
from bench import RESULTS, one_line, where_and_when
from lm_architectures.decode.speculation import DraftStatistics, validation_drafts
from lm_architectures.files import UserError, friendly_errors
from lm_architectures.settings import check_ranges, load_settings
from papers.context_ready import unrolls as cr
from papers.gpn import state
from papers.nextlat import probes
from papers.sps import gradient_flow

HERE = Path(__file__).parent
ALPHA = 0.05  # family-wise significance level of a paper's tests
DEFINING = 'statistic', 'ours', 'direction', 'other', 'margin'  # old results are reused if these are equal
COSTS = 'our_tokens', 'our_command', 'other_tokens', 'other_command', 'where'  # columns of claims.csv
SUPPORTED, OPPOSITE, UNSEEN, DESCRIBED = 'supported', 'opposite here', 'not seen at this size', 'described'
PAPERS = {'sps': 'The State-Prediction Separation Hypothesis', 'context_ready': 'The Context-Ready Transformer',
          'nextlat': 'Next-Latent Prediction Transformers Learn Compact World Models',
          'gpn': 'A Single-Layer Model Can Do Language Modeling'}


@dataclass
class Settings:
    out_dir: str = 'out/claims'  # folder of the runs and tables
    only: str = 'all'  # papers (sps, context_ready, nextlat, gpn) and names of claims, separated by commas
    list: bool = False  # print the claims and exit
    seeds: int = 5  # runs of each row of claims_runs.csv
    jobs: int = 2  # runs trained at a time, with one thread each

    def __post_init__(self):
        check_ranges(self, seeds=2, jobs=1)


RUNS = {row['name']: row for row in read_csv(HERE / 'claims_runs.csv')}


def arguments(name: str) -> list[str]:
    """Return a run's arguments of train.py, without seed and folder."""
    config, *own = RUNS[name]['arguments'].split()  # these come last, so they override the common ones
    # one dtype for all: with `auto`, it would depend on model size
    return [config, '--dtype=float32', '--eval_tokens=500_000', '--eval_interval=1_000_000', '--sample_tokens=0', *own]


@dataclass
class Claim:
    name: str
    paper: str  # key of PAPERS
    section: str
    says: str
    number: str  # the paper's number for `ours`, then for `other`
    ours: str  # key of RUNS, or FILE: MODEL
    direction: str  # lower or higher: `ours` compared with `other`
    other: str | float  # the same, or a fixed number
    statistic: str = 'loss'  # key of STATISTICS
    tested: bool = False  # False: described, without a p-value
    margin: float = 0.0  # nats per token by which `ours` may be worse according to the paper


def read_claim(row: dict[str, str]) -> Claim:
    """Return the claim of a row of claims.csv."""
    other = row['other']
    return Claim(**row | {'other': other if other in RUNS or ': ' in other else float(other),
                          'tested': row['tested'] == 'yes', 'margin': float(row['margin'] or 0)})


CLAIMS = [read_claim(row) for row in read_csv(HERE / 'claims.csv')]


def select_claims(only: str) -> list[Claim]:
    """Return the claims selected by --only, in the order of CLAIMS."""
    names = only.split(',')
    unknown = set(names) - {'all', *PAPERS, *(claim.name for claim in CLAIMS)}
    if unknown:
        raise UserError(f'only has {min(unknown)!r}: expected papers ({", ".join(PAPERS)}) or names of claims '
                        '(see --list), separated by commas')
    return [claim for claim in CLAIMS if {'all', claim.paper, claim.name} & {*names}]


# ---- the statistics of a run, computed once: claims share runs and statistics ----

@cache
def later_gradients(run: Run) -> list[float]:
    """Return r(p, k) of `papers.sps.gradient_flow` by stream, a geometric mean over k = 1 to 96."""
    s = gradient_flow.fitted(gradient_flow.Settings(n_documents=16, block_size=256, max_k=96), [run])
    return gradient_flow.measure(run, s)[0][:, 1:].log().mean(1).exp().tolist()  # x and rho, or the only stream


@cache
def unrolls(run: Run) -> dict:
    return cr.row_of(run, cr.Settings(tokens=32_768))


def closed_gap(run: Run) -> float:
    row = unrolls(run)
    return (row['K=1'] - row['K=3']) / (row['K=1'] - row['K=5'])


@cache
def drafts(run: Run) -> DraftStatistics:
    model, data = figures.load(run, figures.ModelSettings())
    return validation_drafts(model, data, run.settings.block_size, 16)


def far_probe(run: Run) -> float:
    """Return the loss of the last probe of `papers.nextlat.probes`."""
    s = probes.Settings(offsets=20, steps=500, eval_tokens=100_000, learning_rate=1e-3)
    return probes.measure(run, s)[-1]


def levels_solved(run: Run) -> float:
    """Return the mean of the last logged scores of a pointer-chasing run."""
    return statistics.mean(run.logged(name)[-1] for name in score_names(run, ('levels_solved',)))


def unigram_correlation(run: Run) -> float:
    """Return a number of `papers.gpn.state`, from eight batches of eight validation windows."""
    rows = state.rows_of(run, state.Settings(batch_size=8, unigram_tokens=1_000_000))
    return next(number for _, name, _, number in rows if name == 'rank correlation with the unigram')


STATISTICS = {  # name: function(run)
    'loss': Run.final_loss,
    'later gradient at x': lambda run: later_gradients(run)[0],
    'later gradient where it predicts': lambda run: later_gradients(run)[-1],
    'contraction L, windows pooled': lambda run: unrolls(run)['L_pooled'],
    'gap in perplexity that K = 3 closes': closed_gap,
    'tokens accepted a draft': lambda run: drafts(run).accepted_per_step,
    'first drafted token accepted': lambda run: drafts(run).accepted_at[0] / drafts(run).tried_at[0],
    'nats of a probe 20 ahead': far_probe,
    'levels solved': levels_solved,
    'rank correlation with the unigram': unigram_correlation,
}


# ---- verdicts ----

def judge(ours: list[float], other: list[float], direction: str, margin: float) -> dict:
    """Compare one number per seed on each side, or with a fixed number. Return result columns."""
    from scipy.stats import ttest_1samp
    sign, gaps = {'lower': 1, 'higher': -1}[direction], figures.paired_gaps(ours, other)
    found = figures.mean_and_interval(gaps, 'difference', 'low', 'high')
    return found | {'sd': statistics.stdev(gaps), 'agrees': sign * found['difference'] < margin,
                    'p': ttest_1samp([sign * x - margin for x in gaps], 0).pvalue}


def holm(p_values: list[float], n: int) -> list[float]:
    """Correct p-values by Holm's method for n tests, of which some may not have been run."""
    ordered = sorted(p_values)
    return [min(1, max((n - i) * q for i, q in enumerate(ordered[:ordered.index(p) + 1]))) for p in p_values]


def smallest_effect(sd: float, seeds: int, alpha: float, power: float = 0.8) -> float:
    """Return the effect that a two-sided paired t-test at level alpha finds with this power."""
    from scipy import optimize, stats
    critical = stats.t.ppf(1 - alpha / 2, seeds - 1)
    return sd / seeds ** 0.5 * optimize.brentq(lambda shift: stats.nct.sf(critical, seeds - 1, shift) - power, 0, 1000)


def add_verdicts(rows: list[dict]) -> dict[str, dict]:
    """Add corrected p-values and verdicts to rows of `make_row`. Returns {name: row}."""
    tested = {paper: [c.name for c in CLAIMS if c.paper == paper and c.tested] for paper in PAPERS}
    found = {row['name']: row | {'p': '', 'p_holm': '', 'smallest': '', 'verdict': DESCRIBED} for row in rows}
    for names in tested.values():
        of_paper = [row for row in rows if row['name'] in names]
        for row, p in zip(of_paper, holm([row['p'] for row in of_paper], len(names))):
            smallest = smallest_effect(row['sd'], row['seeds'], ALPHA / len(names))
            verdict = UNSEEN if p >= ALPHA else SUPPORTED if row['agrees'] else OPPOSITE
            found[row['name']] = row | {'p_holm': p, 'smallest': smallest, 'verdict': verdict}
    return found


# ---- the tables ----

def comparison_row(side: str) -> dict[str, str] | None:
    """Return the row of a side `FILE: MODEL` of a claim, None if it has not been run."""
    file, _, model = side.partition(': ')
    rows = read_csv(RESULTS / file) if (RESULTS / file).exists() else []
    return next((row for row in rows if row['model'] == model), None)


def has_runs(c: Claim) -> bool:
    """Return False for a claim about a comparison that has not been run."""
    return c.ours in RUNS or None not in map(comparison_row, (c.ours, c.other))


def make_row(c: Claim, ours: list[float], other: list[float], costs: dict) -> dict:
    """Return a row of claims.csv without its verdict: the claim, its test and `costs`."""
    return {**{key: getattr(c, key) for key in ('name', 'paper', *DEFINING)}, 'seeds': len(ours),
            'our_mean': statistics.mean(ours), 'other_mean': statistics.mean(other),
            **judge(ours, other, c.direction, c.margin),
            'our_numbers': ' '.join(map(repr, ours)), 'other_numbers': ' '.join(map(repr, other)), **costs}


def saved_rows(path: Path) -> dict[str, dict]:
    """Return {name: row} recomputed from an earlier claims.csv, without changed claims."""
    claim_of, rows = {c.name: c for c in CLAIMS}, {}
    for old in read_csv(path) if path.exists() else []:
        if old['name'] in claim_of:
            numbers = [[float(x) for x in old[side].split()] for side in ('our_numbers', 'other_numbers')]
            row = make_row(claim_of[old['name']], *numbers, {key: old[key] for key in COSTS})
            if all(str(row[key]) == old[key] for key in DEFINING):
                rows[old['name']] = row
    return rows


def markdown(rows: dict[str, dict]) -> str:
    """Return the text of claims.md: a table for each paper."""
    verdicts = [row['verdict'] for row in rows.values()]
    counts = ', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in (SUPPORTED, UNSEEN, OPPOSITE, DESCRIBED))
    lines = ["# The papers' claims on small models", '',
             f'{len(rows)} claims: {counts}. Tests are two-sided and paired by seed, at a family-wise level of {ALPHA} '
             'per paper; "smallest" is the effect that they find with a probability of 80%. These models are 15 to '
             "several thousand times smaller than the papers' models. claims.csv has the numbers of each seed, the "
             'commands and the machine.']
    for paper, title in PAPERS.items():
        shown = [in_markdown(c, rows[c.name]) for c in CLAIMS if c.paper == paper and c.name in rows]
        if shown:
            lines += ['', f'## {title}', '', figures.markdown_table(shown)]
    return '\n'.join(lines) + '\n'


def in_markdown(c: Claim, row: dict) -> dict[str, str]:
    """Format a row of claims.csv for claims.md."""
    other = f'{row["other_mean"]:.5g}' + ('' if isinstance(c.other, float) else f' ({c.other})')
    bounds = '' if row['low'] is None else f' ({row["low"]:+.4g} to {row["high"]:+.4g})'
    return {'section': c.section, 'claim': c.says, "the paper's number": c.number, 'statistic': c.statistic,
            'ours': f'{row["our_mean"]:.5g} ({c.ours})', 'compared with': other,
            'difference (95%)': f'{row["difference"]:+.4g}{bounds}', 'seeds': row['seeds'], 'sd': f'{row["sd"]:.2g}',
            **{title: '' if row[key] == '' else f'{row[key]:.2g}'
               for title, key in (('smallest', 'smallest'), ('p', 'p'), ('p (Holm)', 'p_holm'))},
            'verdict': f'**{row["verdict"]}**'}


def train(s: Settings, claims: list[Claim], out: Path) -> dict[str, list[Path]]:
    """Train the runs that the claims need. Returns {name of RUNS: runs, one per seed}."""
    needed = {name: Method(arguments(name), f'{out}/{name}')
              for name in RUNS if any(name in (c.ours, c.other) for c in claims)}
    searched = {name: method for name, method in needed.items() if RUNS[name]['search_rate'] == 'yes'}
    if searched:
        set_best_rates(searched, s.jobs)
    return train_seeds(needed, s.seeds, s.jobs)


def measured(side: str | float, statistic: str, runs: dict[str, list[Run]]) -> tuple:
    """Return a side of a claim: its numbers, one per seed, its training tokens and its command."""
    if isinstance(side, float):
        return [side], '', ''
    if side not in RUNS:
        row = comparison_row(side)
        return [*map(float, row['losses'].split())], row['tokens'], f'bench/results/{side}'
    settings = runs[side][0].settings
    command = ['python train.py', *arguments(side), f'--learning_rate={settings.learning_rate}']
    return [*map(STATISTICS[statistic], runs[side])], settings.max_tokens, ' '.join(command)


def measured_rows(claims: list[Claim], folders: dict[str, list[Path]]) -> dict[str, dict]:
    """Return {name: `make_row`} of claims whose runs are trained."""
    runs = {name: [*map(Run, of_seeds)] for name, of_seeds in folders.items()}
    rows, where = {}, one_line(where_and_when())
    for c in claims:
        (ours, *our_costs), (other, *other_costs) = (measured(side, c.statistic, runs) for side in (c.ours, c.other))
        costs = dict(zip(COSTS, (*our_costs, *other_costs, where if c.ours in RUNS else '')))
        rows[c.name] = make_row(c, ours, other, costs)
    return rows


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'unexpected {positional[0]!r}: python -m analysis.claims --out_dir=NEW')
        out, chosen = Path(s.out_dir), select_claims(s.only)
        if s.list:
            for c in chosen:
                print(f'{c.name}: {c.says} ({c.paper}, {c.section}: {c.number})\n    {c.statistic}: {c.ours}, '
                      f'{c.direction}, compared with {c.other}; {"tested" if c.tested else "described"}')
            return
        claims = [c for c in chosen if has_runs(c)]
        missing = sorted({c.ours for c in chosen if c not in claims})
        where = f'bench/results/trials.md has the state of comparisons that have not been run: {"; ".join(missing)}'
        if not claims:
            raise UserError(f'no runs for {s.only}: {where}')
        if missing:
            print(f'some claims are left out: {where}')
        out.mkdir(parents=True, exist_ok=True)
        runs = train(s, claims, out)
        torch.set_num_threads(1)
        rows = saved_rows(out / 'claims.csv') | measured_rows(claims, runs)
        rows = add_verdicts([rows[c.name] for c in CLAIMS if c.name in rows])
        text = markdown(rows)
        print(text)
        figures.write(out / 'claims', {'.csv': [*rows.values()], '.md': text})


if __name__ == '__main__':
    main()
