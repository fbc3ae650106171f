"""Is the baseline strong? model_standard beside a Transformer of nanoGPT's shape, on the same tokens and in equal time.

    python -m analysis.baseline --data=FOLDER --out_dir=out/baseline                  6 layers of 384
    python -m analysis.baseline --data=FOLDER --n_layer=8 --n_head=8 --n_embd=512 --out_dir=out/baseline_512

Equal parameters within 1%, by Standard's feed-forward net: three matrices of 8/3 C where nanoGPT has two of 4 C. Each
has its learning rate bracketed at the first seed, then trains with every seed; all else is the config's for both. In
equal time: nanoGPT's shape on as many more or fewer tokens as it is faster or slower, by the first run of each. Runs
that are done are not trained again.

Writes baseline.csv and baseline.md in out_dir. Intervals are 95%: Student's t, and Welch's for differences.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import statistics
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path

from analysis.figures import write_csv
from analysis.outcomes import final_loss, n_parameters, settings_of, speed
from analysis.seeds import between, difference, interval
from analysis.sweep import best_rates, train_all
from bench import markdown_table, where_and_when
from common.files import UserError, friendly_errors, write_file
from common.settings import check_ranges, load_settings

OURS, NANOGPT, IN_OUR_TIME = 'Standard', "nanoGPT's shape", "nanoGPT's shape, in Standard's time"


@dataclass
class Settings:
    out_dir: str = 'out/baseline'  # of the runs and of what is written
    config: str = 'config/quickstart.py'  # settings of all runs, but for those below
    data: str = 'python_docs'  # folder of prepare_fineweb.py or built-in data
    n_layer: int = 6  # depth of both, as nanoGPT's shakespeare_char
    n_head: int = 6  # attention heads
    n_embd: int = 384  # width
    batch_size: int = 8  # windows of 256 tokens a step
    max_tokens: int = 2_000_000  # training tokens
    seeds: int = 3  # runs of each, at its best learning rate
    jobs: int = 2  # runs at a time, one thread each

    def __post_init__(self):
        at_least_1 = (1, inf)
        check_ranges(self, n_layer=at_least_1, n_head=at_least_1, n_embd=(64, inf), batch_size=at_least_1,
                     max_tokens=(256 * self.batch_size, inf), seeds=at_least_1, jobs=at_least_1)


def arguments(s: Settings, name: str) -> list[str]:
    """All arguments of train.py but for tokens, learning rate, seed and folder."""
    n_ffn = round(8 / 3 * s.n_embd / 16) * 16 if name == OURS else 4 * s.n_embd
    own = dict(model='standard' if name == OURS else 'standard.NanoGPT', data=s.data, n_layer=s.n_layer,
               n_head=s.n_head, n_embd=s.n_embd, n_ffn=n_ffn, init_std=0.02, block_size=256, batch_size=s.batch_size,
               micro_batch_size=s.batch_size, eval_interval=1_000_000, sample_tokens=0)
    return [s.config, *(f'--{key}={value}' for key, value in own.items())]


def train_cells(s: Settings, out: Path) -> dict[str, list[Path]]:
    """Trains all that is not done yet: {name: runs, one a seed}."""
    def budget(tokens):
        return [f'--max_tokens={tokens}', f'--warmup_tokens={tokens // 20}']

    def cell(name, tokens, rate, seed=1):
        return out / f'{"standard" if name == OURS else "nanogpt"}_{tokens}_lr{rate:.3g}_seed{seed}'
    out.mkdir(parents=True, exist_ok=True)
    first = dict.fromkeys((OURS, NANOGPT), 1e-3)
    rates = best_rates({name: [*arguments(s, name), *budget(s.max_tokens), '--seed=1'] for name in first}, first,
                       lambda name, rate: cell(name, s.max_tokens, rate), s.jobs)
    ours, theirs = (speed(cell(name, s.max_tokens, first[name])) for name in first)
    tokens = {OURS: s.max_tokens, NANOGPT: s.max_tokens, IN_OUR_TIME: round(s.max_tokens * theirs / ours)}
    runs, commands = {}, {}
    for name, n in tokens.items():
        rate = rates[OURS if name == OURS else NANOGPT]
        runs[name] = [cell(name, n, rate, seed) for seed in range(1, s.seeds + 1)]
        for seed, run in enumerate(runs[name], 1):
            commands[run] = [*arguments(s, name), *budget(n), f'--learning_rate={rate:.3g}', f'--seed={seed}']
    train_all(commands, s.jobs)
    return runs


def table(runs: dict[str, list[Path]]) -> list[dict]:
    """A row of each name; parameters and speed are of the first seed."""
    losses = {name: [final_loss(run) for run in folders] for name, folders in runs.items()}
    rows = []
    for name, values in losses.items():
        run, (low, high) = runs[name][0], interval(values)
        row = {'model': name, 'parameters': n_parameters(run), 'lr': settings_of(run).learning_rate,
               'tokens': settings_of(run).max_tokens, 'tokens_per_s': speed(run), 'seeds': len(values),
               'loss': statistics.mean(values), 'low': low, 'high': high, 'minus_standard': None, 'its_low': None,
               'its_high': None, 'losses': ' '.join(map(repr, values))}
        if name != OURS:
            row['minus_standard'], row['its_low'], row['its_high'] = difference(values, losses[OURS])
        rows.append(row)
    return rows


def markdown(rows: list[dict], s: Settings) -> str:
    about = where_and_when()
    versions = ', '.join(f'{name} {version}' for name, version in about['versions'].items())
    return (f'{about["device"]}; {about["date"]}; commit {about["commit"]}; {versions}. {s.n_layer} layers of '
            f'{s.n_embd}, data {s.data}, windows of 256 tokens, {s.batch_size} a step, {s.seeds} seeds.\n\n'
            + markdown_table([{
                'model': r['model'], 'parameters': f'{r["parameters"]:,}', 'lr': f'{r["lr"]:.2g}',
                'tokens': f'{r["tokens"]:,}', 'tokens/s': f'{r["tokens_per_s"]:,.0f}', 'loss': f'{r["loss"]:.4f}',
                '95%': between(r['low'], r['high']),
                'minus Standard': '' if r['minus_standard'] is None else f'{r["minus_standard"]:+.4f}',
                '95% of that': between(r['its_low'], r['its_high'], '+')} for r in rows]) + '\n')


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.baseline --data=FOLDER --out_dir=NEW')
        out = Path(s.out_dir)
        rows = table(train_cells(s, out))
        write_csv(out / 'baseline.csv', rows)
        write_file(out / 'baseline.md', markdown(rows, s).encode())
        print(f'{markdown(rows, s)}\nwritten to {out}/baseline.md and .csv')


if __name__ == '__main__':
    main()
