"""Is the baseline strong? model_standard beside a Transformer of nanoGPT's shape, on the same tokens and in equal time.

    python -m analysis.baseline --data=FOLDER --out_dir=out/baseline                  6 layers of 384
    python -m analysis.baseline --data=FOLDER --n_layer=8 --n_head=8 --n_embd=512 --out_dir=out/baseline_512
    python -m analysis.baseline --data=FOLDER --batch_size=64 --out_dir=out/baseline_64     shakespeare_char's batch

Equal parameters within 1%, by Standard's feed-forward net: three matrices of 8/3 C where nanoGPT has two of 4 C. Each
has its learning rate bracketed at the first seed, then trains with every seed; all else is the config's for both. In
equal time: nanoGPT's shape on as many more or fewer tokens as it is faster or slower, at the first seed. Runs that
are done are not trained again.

Writes baseline.csv and baseline.md in out_dir. Intervals are 95%: Student's t, and Welch's for differences.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

from dataclasses import dataclass
from math import inf
from pathlib import Path

from analysis.compare import markdown, table
from analysis.figures import write_csv
from analysis.outcomes import speed
from analysis.sweep import best_rates, one_dtype, train_seeds
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
    own = dict(model='standard' if name == OURS else 'standard.NanoGPT256', data=s.data, n_layer=s.n_layer,
               n_head=s.n_head, n_embd=s.n_embd, n_ffn=n_ffn, init_std=0.02, block_size=256, batch_size=s.batch_size,
               micro_batch_size=s.batch_size, eval_interval=1_000_000, sample_tokens=0,
               dtype=one_dtype(big_enough=True))
    return [s.config, *(f'--{key}={value}' for key, value in own.items())]


def train_cells(s: Settings, out: Path) -> dict[str, list[Path]]:
    """Trains all that is not done yet: {name: runs, one a seed}."""
    def budget(tokens):
        return [f'--max_tokens={tokens}', f'--warmup_tokens={tokens // 20}']

    def cell(name, tokens, rate, seed=1):
        return out / f'{"standard" if name == OURS else "nanogpt"}_{tokens}_lr{rate:.3g}_seed{seed}'
    out.mkdir(parents=True, exist_ok=True)
    first = {OURS: 3e-4, NANOGPT: 1e-3}  # the best of the defaults' size after a million tokens
    rates = best_rates({name: [*arguments(s, name), *budget(s.max_tokens), '--seed=1'] for name in first}, first,
                       lambda name, rate: cell(name, s.max_tokens, rate), s.jobs)
    ours, theirs = (speed(cell(name, s.max_tokens, rates[name])) for name in first)
    tokens = {OURS: s.max_tokens, NANOGPT: s.max_tokens, IN_OUR_TIME: round(s.max_tokens * theirs / ours)}
    return train_seeds({name: [*arguments(s, name), *budget(n)] for name, n in tokens.items()},
                       {**rates, IN_OUR_TIME: rates[NANOGPT]},
                       lambda name, rate, seed: cell(name, tokens[name], rate, seed), s.seeds, s.jobs)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.baseline --data=FOLDER --out_dir=NEW')
        out = Path(s.out_dir)
        rows = table(train_cells(s, out))
        text = markdown(rows, f'{s.n_layer} layers of {s.n_embd}, data {s.data}, windows of 256 tokens, '
                              f'{s.batch_size} a step.')
        write_csv(out / 'baseline.csv', rows)
        write_file(out / 'baseline.md', text.encode())
        print(f'{text}\nwritten to {out}/baseline.md and .csv')


if __name__ == '__main__':
    main()
