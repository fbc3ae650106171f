"""Headline claims of the four papers, each tried in miniature: trained, tested over seeds and given a verdict.

    python -m analysis.claims --list                              the claims and the paper's own numbers
    python -m analysis.claims --out_dir=out/claims                train what they need and judge them
    python -m analysis.claims --only=sps,gpn_memory               those of a paper, or by name

A claim is a row of claims.csv beside this file, a run one of claims_runs.csv: docs/evaluation.md explains both.

Tests are one-sided and paired by seed: `t`, Student's t of the differences, and `sign`, the exact sign test, for scores
of tasks, which are far from normal. Each gives two p-values, for the claim and for its opposite. Holm's method corrects
both for the number of claims of a paper. A claim is seen if its corrected p is below 5%, contradicted if that of its
opposite is. Writes claims.csv (the numbers of every seed, both commands, the machine) and claims.md to out_dir.
"""
import statistics
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from pathlib import Path

import torch

from analysis import a5, context_ready, gpn_state, gradient_flow, manhattan, probes
from analysis.compare import method_of, set_best_rates, train_seeds
from analysis.figures import final_loss, logged, lower_test, paired_difference, read_csv, settings_of, write_csv
from analysis.scores import score_names
from bench import markdown_table, one_line, where_and_when
from common.files import UserError, friendly_errors, write_file
from common.machine import pick_device
from common.runs import load_run, read_log, run_data
from common.settings import check_ranges, load_settings
from common.speculative import speculative_generate
from data import open_data

HERE = Path(__file__).parent
ALPHA = 0.05  # level of the tests of a paper's claims, all together
DEFINING = 'statistic', 'ours', 'direction', 'other', 'test', 'margin'  # a claim that differs in one is another claim
COSTS = 'our_tokens', 'our_command', 'other_tokens', 'other_command', 'where'  # columns of claims.csv
SEEN, CONTRADICTED, NOT_SEEN = 'seen', 'contradicted', 'not seen at this size'
PAPERS = {'sps': 'The State-Prediction Separation Hypothesis', 'context_ready': 'The Context-Ready Transformer',
          'nextlat': 'Next-Latent Prediction Transformers Learn Compact World Models',
          'gpn': 'A Single-Layer Model Can Do Language Modeling'}


@dataclass
class Settings:
    out_dir: str = 'out/claims'  # folder of the runs and tables
    only: str = 'all'  # papers (sps, context_ready, nextlat, gpn) and names of claims, separated by commas
    list: bool = False  # print the claims and stop
    seeds: int = 5  # runs of each row of claims_runs.csv; a sign test needs at least 6
    jobs: int = 2  # runs at a time, one thread each

    def __post_init__(self):
        check_ranges(self, seeds=(2, inf), jobs=(1, inf))


RUNS = {row['name']: row for row in read_csv(HERE / 'claims_runs.csv')}


def arguments(name: str) -> list[str]:
    """Return the arguments of train.py of a row of claims_runs.csv, without learning rate, seed and folder."""
    config, *own = RUNS[name]['arguments'].split()  # its own come last, so they hold
    # one dtype for all: `auto` would give large models another than small ones
    return [config, '--dtype=float32', '--eval_tokens=500_000', '--eval_interval=1_000_000', '--sample_tokens=0', *own]


@dataclass
class Claim:
    name: str
    paper: str  # of PAPERS
    section: str
    says: str
    number: str  # the paper's own: ours, then the other
    ours: str  # of RUNS
    direction: str  # lower or higher: ours, compared with the other
    other: str | float  # of RUNS, or a fixed number
    statistic: str = 'loss'  # of STATISTICS
    test: str = 't'  # t or sign
    margin: float = 0.0  # lead that the paper's own numbers leave the other, in nats per token


def read_claim(row: dict[str, str]) -> Claim:
    other = row['other'] if row['other'] in RUNS else float(row['other'])
    return Claim(**row | {'other': other, 'margin': float(row['margin'] or 0)})


CLAIMS = [read_claim(row) for row in read_csv(HERE / 'claims.csv')]


def chosen(only: str) -> list[Claim]:
    """Return the claims that --only names, in the order of CLAIMS."""
    names = only.split(',')
    unknown = set(names) - {'all', *PAPERS, *(claim.name for claim in CLAIMS)}
    if unknown:
        raise UserError(f'only has {min(unknown)!r}: expected papers ({", ".join(PAPERS)}) or names of claims, which '
                        '--list prints, separated by commas')
    return [claim for claim in CLAIMS if {'all', claim.paper, claim.name} & {*names}]


# ---- the statistics of a run ----

def later_gradient(run) -> dict[str, float]:
    """Return the geometric mean over losses 1 to 96 steps later of their gradient over that of a position's own."""
    s = gradient_flow.fitted(gradient_flow.Settings(n_documents=16, block_size=256, max_k=96), [run])
    means = gradient_flow.measure(run, s)[0][:, 1:].log().mean(1).exp().tolist()  # of x and rho, or of the only stream
    return {'later gradient at x': means[0], 'later gradient where it predicts': means[-1]}


def unrolls(run) -> dict[str, float]:
    row = context_ready.analyse(run, context_ready.Settings(tokens=32_768))
    gap = row['K=1'] - row['K=5']
    return {'contraction L, windows pooled': nan if row['L_pooled'] == '' else row['L_pooled'],
            'gap that K = 3 closes': (row['K=1'] - row['K=3']) / gap if gap else nan}


def drafts(run) -> dict[str, float]:
    """Sample with drafts of up to 5 tokens after the first halves of validation windows."""
    model, record = load_run(run, pick_device('auto'))
    data, half = run_data(record, None), settings_of(run).block_size // 2
    prompts = data.val_batch(range(min(16, data.n_windows('val', half))), half)[0].tolist()
    _, found = speculative_generate(model, prompts, half, draft_len=min(5, model.longest_draft))
    return {'tokens accepted a draft': found.accepted_per_step}


def probed(run) -> dict[str, float]:
    *_, last = probes.measure(run, probes.Settings(offsets=20, steps=500, eval_tokens=100_000, learning_rate=1e-3))
    return {'nats of a probe 20 ahead': last}


def city(run) -> dict[str, float]:
    row, _ = manhattan.measure(run, manhattan.Settings(n_walks=500, n_prefixes=500))
    return {'effective rank': row['rank']}


def gpn_states(run) -> dict[str, float]:
    """Return statistics of eight batches of eight validation windows, and the unigram of a million training tokens."""
    model, record = load_run(run, pick_device('auto'))
    device, data, T = model.embed.weight.device, run_data(record, None), settings_of(run).block_size
    batches = [[x.to(device) for x in data.val_batch(range(8 * i, 8 * i + 8), T)] for i in range(8)]
    counted = torch.from_numpy(data.tokens('train', 0, min(1_000_000, data.splits['train']['tokens'])))
    rows = gpn_state.measure(model, batches, torch.bincount(counted, minlength=data.n_ids).to(device), str)
    value = {(part, name, x): number for part, name, x, number in rows}
    return {'cosine of mean states between batches': value['mean direction', 'cosine between batches', ''],
            'rank correlation with the unigram': value['mean direction', 'rank correlation with the unigram', ''],
            'centred cosine 64 later': value['cosine', 'centred', 64]}


def states_beyond(run) -> dict[str, float]:
    """Return the share of right states beyond the trained length, in held-out words three times as long.

    The states are those of p_psi alone if the model has it (see analysis.a5), else the model's own.
    """
    device, trained = pick_device('auto'), a5.trained_length(run)
    scores = open_data(f'a5:length={3 * trained},val_rows=2000').score(load_run(run, device)[0], device, 1000)
    name = 'rnn_accuracy' if 'rnn_accuracy_1' in scores else 'accuracy'
    return {'right states beyond the trained length':
            statistics.mean(scores[f'{name}_{t}'] for t in range(trained + 1, 3 * trained + 1))}


def last_score(run, prefix: str) -> float:
    """Return the mean of a task's last scores whose names start with the prefix."""
    log = read_log(run)
    return statistics.mean(logged(log, name)[-1] for name in score_names([run], prefix))


STATISTICS = {  # name: function of a run folder that returns {name: number}, possibly with others
    'loss': lambda run: {'loss': final_loss(run)},
    'later gradient at x': later_gradient,
    'later gradient where it predicts': later_gradient,
    'contraction L, windows pooled': unrolls,
    'gap that K = 3 closes': unrolls,
    'tokens accepted a draft': drafts,
    'nats of a probe 20 ahead': probed,
    'effective rank': city,
    'levels solved': lambda run: {'levels solved': last_score(run, 'levels_solved')},
    'whole paths': lambda run: {'whole paths': last_score(run, 'accuracy')},
    'right states beyond the trained length': states_beyond,
    'cosine of mean states between batches': gpn_states,
    'rank correlation with the unigram': gpn_states,
    'centred cosine 64 later': gpn_states,
}


# ---- verdicts ----

def p_values(gaps: list[float], test: str) -> tuple[float, float]:
    """Return the p-values of two alternatives: that the differences are below 0, and that they are above."""
    if test == 't':
        p = lower_test(gaps, [0.0])['p']
        return p, 1 - p
    from scipy.stats import binomtest
    below, above = sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)
    return tuple(binomtest(n, len(gaps), alternative='greater').pvalue for n in (below, above))


def judge(ours: list[float], other: list[float], direction: str, test: str, margin: float) -> dict:
    """Return the difference, its 95% interval and the p-values of one number per seed on each side, or a fixed one."""
    sign = {'lower': 1, 'higher': -1}[direction]
    gap, low, high = paired_difference(ours, other)
    gaps = [sign * (x - y) - margin for x, y in zip(ours, other * len(ours) if len(other) == 1 else other, strict=True)]
    p, p_opposite = p_values(gaps, test)
    return {'difference': gap, 'low': low, 'high': high, 'p': p, 'p_opposite': p_opposite}


def holm(p_values: list[float]) -> list[float]:
    """Return the p-values corrected by Holm's method."""
    n, ordered = len(p_values), sorted(p_values)
    return [min(1, max((n - i) * q for i, q in enumerate(ordered[:ordered.index(p) + 1]))) for p in p_values]


def with_verdicts(rows: list[dict]) -> dict[str, dict]:
    """Return {name: row} of rows of `row_of`, with the p-values that Holm's method corrects for a paper's claims."""
    found = {}
    for paper in PAPERS:
        of_paper = [row for row in rows if row['paper'] == paper]
        corrected = [holm([row[key] for row in of_paper]) for key in ('p', 'p_opposite')]
        for row, p, p_opposite in zip(of_paper, *corrected):
            verdict = SEEN if p < ALPHA else CONTRADICTED if p_opposite < ALPHA else NOT_SEEN
            found[row['name']] = row | {'p_holm': p, 'p_opposite_holm': p_opposite, 'verdict': verdict}
    return found


# ---- the tables ----

def row_of(c: Claim, ours: list[float], other: list[float], costs: dict) -> dict:
    """Return a row of claims.csv without its verdict: the claim, its test on the numbers of each seed, and `costs`."""
    return {**{key: getattr(c, key) for key in ('name', 'paper', *DEFINING)}, 'seeds': len(ours),
            'our_mean': statistics.mean(ours), 'other_mean': statistics.mean(other),
            **judge(ours, other, c.direction, c.test, c.margin),
            'our_numbers': ' '.join(map(repr, ours)), 'other_numbers': ' '.join(map(repr, other)), **costs}


def kept_rows(path: Path) -> dict[str, dict]:
    """Return {name: row of `row_of`} of the numbers in a claims.csv, without claims that changed."""
    claim_of, rows = {c.name: c for c in CLAIMS}, {}
    for old in read_csv(path) if path.exists() else []:
        if old['name'] in claim_of:
            numbers = [[float(x) for x in old[side].split()] for side in ('our_numbers', 'other_numbers')]
            row = row_of(claim_of[old['name']], *numbers, {key: old[key] for key in COSTS})
            if all(str(row[key]) == old[key] for key in DEFINING):
                rows[old['name']] = row
    return rows


def markdown(rows: dict[str, dict]) -> str:
    """Return claims.md: a table for each paper."""
    verdicts = [row['verdict'] for row in rows.values()]
    counts = ', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in (SEEN, NOT_SEEN, CONTRADICTED))
    lines = ['# Claims of the papers, in miniature', '',
             f'{len(rows)} claims: {counts}. Tests are one-sided and paired by seed, at a level of {ALPHA} for all '
             "claims of a paper together. These models are about a thousand times smaller than the papers': what is "
             'not seen here may hold there. claims.csv has the numbers of each seed, the commands and the machine.']
    for paper, title in PAPERS.items():
        shown = [in_markdown(c, rows[c.name]) for c in CLAIMS if c.paper == paper and c.name in rows]
        if shown:
            lines += ['', f'## {title}', '', markdown_table(shown)]
    return '\n'.join(lines) + '\n'


def in_markdown(c: Claim, row: dict) -> dict[str, str]:
    """Return a row of claims.md."""
    other = f'{row["other_mean"]:.5g}' + ('' if isinstance(c.other, float) else f' ({c.other})')
    bounds = '' if row['low'] is None else f' ({row["low"]:+.4g} to {row["high"]:+.4g})'
    return {'section': c.section, 'claim': c.says, "the paper's number": c.number, 'statistic': c.statistic,
            'ours': f'{row["our_mean"]:.5g} ({c.ours})', 'compared with': other,
            'difference (95%)': f'{row["difference"]:+.4g}{bounds}', 'seeds': row['seeds'], 'test': c.test,
            'p': f'{row["p"]:.2g}', 'p (Holm)': f'{row["p_holm"]:.2g}', 'verdict': f'**{row["verdict"]}**'}


def train(s: Settings, claims: list[Claim], out: Path) -> dict[str, list[Path]]:
    """Train what the claims need. Return {name of RUNS: runs, one per seed}."""
    needed = {name: method_of(arguments(name), f'{out}/{name}')
              for name in RUNS if any(name in (c.ours, c.other) for c in claims)}
    searched = {name: method for name, method in needed.items() if RUNS[name]['search_rate'] == 'yes'}
    if searched:
        set_best_rates(searched, s.jobs)
    return train_seeds(needed, s.seeds, s.jobs)


def measured_rows(claims: list[Claim], runs: dict[str, list[Path]]) -> dict[str, dict]:
    """Return {name: row of `row_of`} of trained runs."""
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
        rows[c.name] = row_of(c, *numbers, costs | {'where': where})
    return rows


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.claims --out_dir=NEW')
        out, claims = Path(s.out_dir), chosen(s.only)
        if s.list:
            for c in claims:
                print(f'{c.name}: {c.says} ({c.paper}, {c.section}: {c.number})\n'
                      f'    {c.statistic}: {c.ours}, {c.direction}, compared with {c.other}; {c.test} test')
            return
        out.mkdir(parents=True, exist_ok=True)
        runs = train(s, claims, out)
        torch.set_num_threads(1)
        rows = kept_rows(out / 'claims.csv') | measured_rows(claims, runs)
        rows = with_verdicts([rows[c.name] for c in CLAIMS if c.name in rows])
        write_csv(out / 'claims.csv', [*rows.values()])
        text = markdown(rows)
        write_file(out / 'claims.md', text.encode())
        print(f'{text}\nwritten to {out}/claims.md and claims.csv')


if __name__ == '__main__':
    main()
