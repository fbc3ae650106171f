"""Headline claims of the four papers, each tried in miniature: trained, tested over seeds and given a verdict.

    python -m analysis.claims --list                              the claims and the paper's own numbers
    python -m analysis.claims --out_dir=out/claims                train what they need and judge them
    python -m analysis.claims --only=sps,gpn_memory               those of a paper, or by name

A claim is a row of claims.csv beside this file, a run one of claims_runs.csv: docs/evaluation.md explains both.

A claim is seen if its test rejects in the direction of the claim at 5%, contradicted if the same test rejects in the
other direction, each by itself. The tests are `t`: Welch's one-sided test over seeds, the one-sample test against a
fixed number, and for `equal` both one-sided tests (TOST); `sign`: every seed is on one side, for scores of tasks, which
are far from normal. Writes claims.csv (the numbers of every seed, both commands, the machine) and claims.md to out_dir.
"""
import statistics
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from pathlib import Path

import torch

from analysis import a5, context_ready, gpn_state, gradient_flow, manhattan, probes
from analysis.compare import Method, set_best_rates, train_seeds
from analysis.figures import difference, final_loss, interval, logged, lower_test, read_csv, settings_of, write_csv
from analysis.scores import score_names
from bench import markdown_table, one_line, where_and_when
from common.files import UserError, friendly_errors, write_file
from common.machine import pick_device
from common.runs import load_run, read_log, run_data
from common.settings import check_ranges, load_settings
from common.speculative import speculative_generate
from data import open_data

HERE = Path(__file__).parent
ALPHA = 0.05  # level of the tests
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
    max_tokens: int = 1_000_000  # training tokens of a run; claims_runs.csv says which take more or their own number
    seeds: int = 3  # runs of each row of claims_runs.csv
    jobs: int = 2  # runs at a time, one thread each

    def __post_init__(self):
        check_ranges(self, max_tokens=(1, inf), seeds=(2, inf), jobs=(1, inf))


@dataclass
class Run:
    arguments: str  # of train.py
    rate: float  # learning rate to start at
    times: float = 1  # its training tokens, over max_tokens
    tokens: int = 0  # its training tokens whatever max_tokens is, all at `rate`; 0: as `times` says

    def n_tokens(self, max_tokens: int) -> int:
        return self.tokens or round(self.times * max_tokens)


RUNS = {row['name']: Run(row['arguments'], float(row['rate']), float(row['times'] or 1), int(row['tokens'] or 0))
        for row in read_csv(HERE / 'claims_runs.csv')}


def arguments(s: Settings, run: Run) -> list[str]:
    """Return the arguments of train.py without learning rate, seed and folder."""
    tokens = run.n_tokens(s.max_tokens)
    config, *own = run.arguments.split()  # its own come last, so they hold
    # one dtype for all: `auto` would give large models another than small ones
    return [config, f'--max_tokens={tokens}', f'--warmup_tokens={tokens // 20}', '--dtype=float32',
            '--eval_tokens=500000', '--eval_interval=1_000_000', '--sample_tokens=0', *own]


@dataclass
class Claim:
    name: str
    paper: str  # of PAPERS
    section: str
    says: str
    number: str  # the paper's own: ours, then the other
    ours: str  # of RUNS
    direction: str  # lower, higher or equal: ours, compared with the other
    other: str | float  # of RUNS, or a fixed number
    statistic: str = 'loss'  # of STATISTICS
    test: str = 't'  # t or sign
    margin: float = 0.0  # equal: the largest difference; else t: the allowed lead of `other`; sign: the least lead


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

def t_test(ours: list[float], other: list[float], direction: str, margin: float) -> tuple[float, str]:
    """Return (p, verdict) of Welch's or the one-sample test, of TOST for `equal`."""
    is_lower, is_higher = lower_test(ours, other, margin)['p'], lower_test(other, ours, margin)['p']
    p = {'lower': is_lower, 'higher': is_higher, 'equal': max(is_lower, is_higher)}[direction]
    # 1 - p belongs to the test in the other direction; of `equal`, to two, as the difference may exceed either margin
    other_level = ALPHA / 2 if direction == 'equal' else ALPHA
    return p, SEEN if p < ALPHA else CONTRADICTED if 1 - p < other_level else NOT_SEEN


def sign_test(ours: list[float], other: list[float], direction: str, margin: float) -> tuple[float, str]:
    """Return (p, verdict) from the number of seeds that lead by more than the margin, paired by seed."""
    from scipy.stats import binomtest
    sign = {'lower': 1, 'higher': -1}[direction]
    leads = [sign * (b - a) for a, b in zip(ours, other, strict=True)]
    n_ahead = sum(lead > margin for lead in leads)
    verdict = SEEN if n_ahead == len(leads) else CONTRADICTED if max(leads) < -margin else NOT_SEEN
    return binomtest(n_ahead, len(leads), alternative='greater').pvalue, verdict


def judge(ours: list[float], other: list[float], direction: str, test: str, margin: float) -> dict:
    """Return {'difference', 'low', 'high', 'p', 'verdict'} from one number per seed on each side, or a fixed one."""
    p, verdict = (t_test if test == 't' else sign_test)(ours, other, direction, margin)
    gap, low, high = statistics.mean(ours) - statistics.mean(other), None, None
    if len(other) == 1:
        low, high = interval([x - other[0] for x in ours])
    elif test == 't':
        _, low, high = difference(ours, other)
    return {'difference': gap, 'low': low, 'high': high, 'p': p, 'verdict': verdict}


# ---- the tables ----

def row_of(c: Claim, ours: list[float], other: list[float], costs: dict) -> dict:
    """Return a row of claims.csv: the claim, its verdict from the numbers of each seed, and `costs`."""
    return {**{key: getattr(c, key) for key in ('name', 'paper', *DEFINING)}, 'seeds': len(ours),
            'our_mean': statistics.mean(ours), 'other_mean': statistics.mean(other),
            **judge(ours, other, c.direction, c.test, c.margin),
            'our_numbers': ' '.join(map(repr, ours)), 'other_numbers': ' '.join(map(repr, other)), **costs}


def kept_rows(path: Path) -> dict[str, dict]:
    """Return {name: row} of a claims.csv, verdicts computed again from its numbers; without claims that changed."""
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
             f'{len(rows)} claims: {counts}. Level {ALPHA}, each claim by itself: of two equal things one claim in '
             'twenty is called seen and one contradicted, with sign tests at three seeds one in eight each. These '
             "models are about a thousand times smaller than the papers': what is not seen here may hold there. "
             'claims.csv has the numbers of each seed, the commands and the machine; python -m analysis.claims '
             'explains the tests.']
    for paper, title in PAPERS.items():
        shown = [in_markdown(c, rows[c.name]) for c in CLAIMS if c.paper == paper and c.name in rows]
        if shown:
            lines += ['', f'## {title}', '', markdown_table(shown)]
    return '\n'.join(lines) + '\n'


def in_markdown(c: Claim, row: dict) -> dict[str, str]:
    """Return a row of claims.md."""
    other = f'{row["other_mean"]:.5g}' + ('' if isinstance(c.other, float) else f' ({c.other})')
    bounds = '' if row['low'] is None else f' ({row["low"]:+.4g} to {row["high"]:+.4g})'
    test = 'sign' if c.test == 'sign' else 'TOST' if c.direction == 'equal' else (
        'one sample' if isinstance(c.other, float) else 'Welch')
    return {'section': c.section, 'claim': c.says, "the paper's number": c.number, 'statistic': c.statistic,
            'ours': f'{row["our_mean"]:.5g} ({c.ours})', 'compared with': other,
            'difference (95%)': f'{row["difference"]:+.4g}{bounds}', 'seeds': str(row['seeds']), 'test': test,
            'p': f'{row["p"]:.2g}', 'verdict': f'**{row["verdict"]}**'}


def train(s: Settings, claims: list[Claim], out: Path) -> dict[str, list[Path]]:
    """Train what the claims need. Return {name of RUNS: runs, one per seed}."""
    needed = {name: Method(arguments(s, run), run.rate, f'{out}/{name}_{run.n_tokens(s.max_tokens)}')
              for name, run in RUNS.items() if any(name in (c.ours, c.other) for c in claims)}
    searched = {name: method for name, method in needed.items() if not RUNS[name].tokens}
    if searched:
        set_best_rates(searched, s.jobs)
    return train_seeds(needed, s.seeds, s.jobs)


def measured_rows(s: Settings, claims: list[Claim], runs: dict[str, list[Path]]) -> dict[str, dict]:
    """Return {name: row of claims.csv} of trained runs."""
    statistics_of, rows, where = cache(lambda measure, run: measure(run)), {}, one_line(where_and_when())
    for c in claims:
        numbers, costs = [], dict.fromkeys(COSTS, '')
        for who, side in (('our', c.ours), ('other', c.other)):
            if isinstance(side, float):
                numbers.append([side])
                continue
            numbers.append([statistics_of(STATISTICS[c.statistic], run)[c.statistic] for run in runs[side]])
            settings = settings_of(runs[side][0])
            command = ['python train.py', *arguments(s, RUNS[side]), f'--learning_rate={settings.learning_rate}']
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
        rows = kept_rows(out / 'claims.csv') | measured_rows(s, claims, runs)
        write_csv(out / 'claims.csv', [rows[c.name] for c in CLAIMS if c.name in rows])
        text = markdown(rows)
        write_file(out / 'claims.md', text.encode())
        print(f'{text}\nwritten to {out}/claims.md and claims.csv')


if __name__ == '__main__':
    main()
