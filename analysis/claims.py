"""Test the headline claims of the four papers on small models, over several seeds.

    python -m analysis.claims --list                        list the claims and the papers' numbers
    python -m analysis.claims --out_dir=out/claims          train the models and test the claims
    python -m analysis.claims --only=sps,gpn_memory         only a paper's claims, or some by name

Claims are rows of claims.csv, runs are rows of claims_runs.csv (see docs/evaluation.md). Tests are
one-sided and paired by seed: `t` is Student's t on the differences; `sign` is the exact sign test,
for task scores, which are far from normal. The p-values of a claim and of its opposite are
corrected by Holm's method for the number of claims of the paper. A claim is supported if its p is
below 5%, contradicted if that of its opposite is. Writes a claims.csv with the numbers of each
seed, and claims.md, to out_dir.
"""
import statistics
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path

import torch

from analysis import a5, context_ready, gpn_state, gradient_flow, manhattan, probes
from analysis.compare import make_method, set_best_rates, train_seeds
from analysis.figures import final_loss, logged, paired_difference, paired_gaps, read_csv, settings_of, write_csv
from analysis.scores import score_names
from bench import markdown_table, one_line, where_and_when
from common.files import UserError, friendly_errors, write_file
from common.machine import pick_device
from common.runs import load_run, read_log, run_data
from common.settings import check_ranges, load_settings
from common.speculative import validation_drafts
from data import open_data

HERE = Path(__file__).parent
ALPHA = 0.05  # family-wise significance level of a paper's claims
DEFINING = 'statistic', 'ours', 'direction', 'other', 'test', 'margin'  # old results are reused if these are equal
COSTS = 'our_tokens', 'our_command', 'other_tokens', 'other_command', 'where'  # columns of claims.csv
SUPPORTED, CONTRADICTED, INCONCLUSIVE = 'supported', 'contradicted', 'inconclusive at this size'
PAPERS = {'sps': 'The State-Prediction Separation Hypothesis', 'context_ready': 'The Context-Ready Transformer',
          'nextlat': 'Next-Latent Prediction Transformers Learn Compact World Models',
          'gpn': 'A Single-Layer Model Can Do Language Modeling'}


@dataclass
class Settings:
    out_dir: str = 'out/claims'  # folder of the runs and tables
    only: str = 'all'  # papers (sps, context_ready, nextlat, gpn) and names of claims, separated by commas
    list: bool = False  # print the claims and exit
    seeds: int = 5  # runs of each row of claims_runs.csv; a sign test needs at least 6
    jobs: int = 2  # runs trained at a time, with one thread each

    def __post_init__(self):
        check_ranges(self, seeds=2, jobs=1)


RUNS = {row['name']: row for row in read_csv(HERE / 'claims_runs.csv')}


def arguments(name: str) -> list[str]:
    """Return a run's arguments of train.py, without learning rate, seed and folder."""
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
    ours: str  # key of RUNS
    direction: str  # lower or higher: `ours` compared with `other`
    other: str | float  # key of RUNS, or a fixed number
    statistic: str = 'loss'  # key of STATISTICS
    test: str = 't'  # t or sign
    margin: float = 0.0  # nats per token by which `ours` may be worse according to the paper


CLAIMS = [Claim(**row | {'other': row['other'] if row['other'] in RUNS else float(row['other']),
                         'margin': float(row['margin'] or 0)}) for row in read_csv(HERE / 'claims.csv')]


def select_claims(only: str) -> list[Claim]:
    """Return the claims selected by --only, in the order of CLAIMS."""
    names = only.split(',')
    unknown = set(names) - {'all', *PAPERS, *(claim.name for claim in CLAIMS)}
    if unknown:
        raise UserError(f'only has {min(unknown)!r}: expected papers ({", ".join(PAPERS)}) or names of claims '
                        '(see --list), separated by commas')
    return [claim for claim in CLAIMS if {'all', claim.paper, claim.name} & {*names}]


# ---- the statistics of a run ----

def later_gradient(run) -> dict[str, float]:
    """Return r(p, k) of `analysis.gradient_flow` as a geometric mean over k = 1 to 96."""
    s = gradient_flow.fitted(gradient_flow.Settings(n_documents=16, block_size=256, max_k=96), [run])
    means = gradient_flow.measure(run, s)[0][:, 1:].log().mean(1).exp().tolist()  # x and rho, or the only stream
    return {'later gradient at x': means[0], 'later gradient where it predicts': means[-1]}


def unrolls(run) -> dict[str, float]:
    """Return L and how much of the gap K = 3 closes, from `analysis.context_ready`."""
    row = context_ready.analyse(run, context_ready.Settings(tokens=32_768))
    gap = row['K=1'] - row['K=5']
    return {'contraction L, windows pooled': nan if row['L_pooled'] == '' else row['L_pooled'],
            'gap that K = 3 closes': (row['K=1'] - row['K=3']) / gap if gap else nan}


def drafts(run) -> dict[str, float]:
    model, record = load_run(run, pick_device('auto'))
    found = validation_drafts(model, run_data(record, None), record['settings']['block_size'], 16)
    return {'tokens accepted a draft': found.accepted_per_step}


def gpn_states(run) -> dict[str, float]:
    """Return statistics of `analysis.gpn_state`, from eight batches of eight validation windows."""
    rows = gpn_state.analyse(run, gpn_state.Settings(batch_size=8, unigram_tokens=1_000_000))
    value = {(part, name, x): number for part, name, x, number in rows}
    return {'cosine of mean states between batches': value['mean direction', 'cosine between batches', ''],
            'rank correlation with the unigram': value['mean direction', 'rank correlation with the unigram', ''],
            'centred cosine 64 later': value['cosine', 'centred', 64]}


def states_beyond(run) -> dict[str, float]:
    """Return the accuracy on A5 words at positions from one to three times the trained length.

    Evaluates p_psi alone (see `analysis.a5`) if the model has it, else the whole model.
    """
    device, trained = pick_device('auto'), a5.trained_length(run)
    scores = open_data(f'a5:length={3 * trained},val_rows=2000').score(load_run(run, device)[0], device, 1000)
    name = 'rnn_accuracy' if 'rnn_accuracy_1' in scores else 'accuracy'
    return {'right states beyond the trained length':
            statistics.mean(scores[f'{name}_{t}'] for t in range(trained + 1, 3 * trained + 1))}


def last_score(run, prefix: str) -> float:
    """Return the mean of the last logged scores whose names start with the prefix."""
    log = read_log(run)
    return statistics.mean(logged(log, name)[-1] for name in score_names([run], prefix))


STATISTICS = {  # name: function(run folder) -> dict that has this name as a key
    'loss': lambda run: {'loss': final_loss(run)},
    'later gradient at x': later_gradient,
    'later gradient where it predicts': later_gradient,
    'contraction L, windows pooled': unrolls,
    'gap that K = 3 closes': unrolls,
    'tokens accepted a draft': drafts,
    'nats of a probe 20 ahead': lambda run: {'nats of a probe 20 ahead': probes.measure(run, probes.Settings(
        offsets=20, steps=500, eval_tokens=100_000, learning_rate=1e-3))[-1]},
    'effective rank': lambda run: {'effective rank': manhattan.measure(run, manhattan.Settings(
        n_walks=500, n_prefixes=500))[0]['rank']},
    'levels solved': lambda run: {'levels solved': last_score(run, 'levels_solved')},
    'whole paths': lambda run: {'whole paths': last_score(run, 'accuracy')},
    'right states beyond the trained length': states_beyond,
    'cosine of mean states between batches': gpn_states,
    'rank correlation with the unigram': gpn_states,
    'centred cosine 64 later': gpn_states,
}


# ---- verdicts ----

def p_values(gaps: list[float], test: str) -> tuple[float, float]:
    """Return the p-values of two alternatives: the differences are below 0, and above 0."""
    from scipy.stats import binomtest, ttest_1samp
    if test == 't':
        p = ttest_1samp(gaps, 0, alternative='less').pvalue
        return p, 1 - p
    below, above = sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)
    return tuple(binomtest(n, len(gaps), alternative='greater').pvalue for n in (below, above))


def judge(ours: list[float], other: list[float], direction: str, test: str, margin: float) -> dict:
    """Compare one number per seed on each side, or with a fixed number. Return result columns."""
    sign = {'lower': 1, 'higher': -1}[direction]
    gap, low, high = paired_difference(ours, other)
    p, p_opposite = p_values([sign * x - margin for x in paired_gaps(ours, other)], test)
    return {'difference': gap, 'low': low, 'high': high, 'p': p, 'p_opposite': p_opposite}


def holm(p_values: list[float], n: int) -> list[float]:
    """Correct p-values by Holm's method for n tests, of which some may not have been run."""
    ordered = sorted(p_values)
    return [min(1, max((n - i) * q for i, q in enumerate(ordered[:ordered.index(p) + 1]))) for p in p_values]


def add_verdicts(rows: list[dict]) -> dict[str, dict]:
    """Add corrected p-values and verdicts to rows of `make_row`. Returns {name: row}."""
    found = {}
    for paper in PAPERS:
        of_paper = [row for row in rows if row['paper'] == paper]
        n = sum(claim.paper == paper for claim in CLAIMS)
        corrected = [holm([row[key] for row in of_paper], n) for key in ('p', 'p_opposite')]
        for row, p, p_opposite in zip(of_paper, *corrected):
            verdict = SUPPORTED if p < ALPHA else CONTRADICTED if p_opposite < ALPHA else INCONCLUSIVE
            found[row['name']] = row | {'p_holm': p, 'p_opposite_holm': p_opposite, 'verdict': verdict}
    return found


# ---- the tables ----

def make_row(c: Claim, ours: list[float], other: list[float], costs: dict) -> dict:
    """Return a row of claims.csv without its verdict: the claim, its test and `costs`."""
    return {**{key: getattr(c, key) for key in ('name', 'paper', *DEFINING)}, 'seeds': len(ours),
            'our_mean': statistics.mean(ours), 'other_mean': statistics.mean(other),
            **judge(ours, other, c.direction, c.test, c.margin),
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
    counts = ', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in (SUPPORTED, INCONCLUSIVE, CONTRADICTED))
    lines = ["# The papers' claims on small models", '',
             f'{len(rows)} claims: {counts}. Tests are one-sided and paired by seed, at a family-wise level of {ALPHA} '
             "per paper. These models are about a thousand times smaller than the papers' models, so a claim that is "
             'inconclusive here may still hold there. claims.csv has the numbers of each seed, the commands and the '
             'machine.']
    for paper, title in PAPERS.items():
        shown = [in_markdown(c, rows[c.name]) for c in CLAIMS if c.paper == paper and c.name in rows]
        if shown:
            lines += ['', f'## {title}', '', markdown_table(shown)]
    return '\n'.join(lines) + '\n'


def in_markdown(c: Claim, row: dict) -> dict[str, str]:
    """Format a row of claims.csv for claims.md."""
    other = f'{row["other_mean"]:.5g}' + ('' if isinstance(c.other, float) else f' ({c.other})')
    bounds = '' if row['low'] is None else f' ({row["low"]:+.4g} to {row["high"]:+.4g})'
    return {'section': c.section, 'claim': c.says, "the paper's number": c.number, 'statistic': c.statistic,
            'ours': f'{row["our_mean"]:.5g} ({c.ours})', 'compared with': other,
            'difference (95%)': f'{row["difference"]:+.4g}{bounds}', 'seeds': row['seeds'], 'test': c.test,
            'p': f'{row["p"]:.2g}', 'p (Holm)': f'{row["p_holm"]:.2g}', 'verdict': f'**{row["verdict"]}**'}


def train(s: Settings, claims: list[Claim], out: Path) -> dict[str, list[Path]]:
    """Train the runs that the claims need. Returns {name of RUNS: runs, one per seed}."""
    needed = {name: make_method(arguments(name), f'{out}/{name}')
              for name in RUNS if any(name in (c.ours, c.other) for c in claims)}
    searched = {name: method for name, method in needed.items() if RUNS[name]['search_rate'] == 'yes'}
    if searched:
        set_best_rates(searched, s.jobs)
    return train_seeds(needed, s.seeds, s.jobs)


def measured_rows(claims: list[Claim], runs: dict[str, list[Path]]) -> dict[str, dict]:
    """Return {name: `make_row`} of claims whose runs are trained."""
    statistics_of, rows, where = cache(lambda measure, run: measure(run)), {}, one_line(where_and_when())
    for c in claims:
        numbers, costs = [], dict.fromkeys(COSTS, '')
        for who, side in (('our', c.ours), ('other', c.other)):
            if isinstance(side, float):
                numbers.append([side])
                continue
            numbers.append([statistics_of(STATISTICS[c.statistic], run)[c.statistic] for run in runs[side]])
            settings = settings_of(runs[side][0])
            command = ['python train.py', *arguments(side), f'--learning_rate={settings.learning_rate}']
            costs |= {f'{who}_tokens': settings.max_tokens, f'{who}_command': ' '.join(command)}
        rows[c.name] = make_row(c, *numbers, costs | {'where': where})
    return rows


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'unexpected {positional[0]!r}: python -m analysis.claims --out_dir=NEW')
        out, claims = Path(s.out_dir), select_claims(s.only)
        if s.list:
            for c in claims:
                print(f'{c.name}: {c.says} ({c.paper}, {c.section}: {c.number})\n'
                      f'    {c.statistic}: {c.ours}, {c.direction}, compared with {c.other}; {c.test} test')
            return
        out.mkdir(parents=True, exist_ok=True)
        runs = train(s, claims, out)
        torch.set_num_threads(1)
        rows = saved_rows(out / 'claims.csv') | measured_rows(claims, runs)
        rows = add_verdicts([rows[c.name] for c in CLAIMS if c.name in rows])
        write_csv(out / 'claims.csv', [*rows.values()])
        text = markdown(rows)
        write_file(out / 'claims.md', text.encode())
        print(f'{text}\nwritten to {out}/claims.md and claims.csv')


if __name__ == '__main__':
    main()
