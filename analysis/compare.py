"""Train and compare models with several seeds, each at a learning rate found by a search.

    python -m analysis.compare --out_dir=out/a "GPN: config/gpn_small.py" "GDN: config/gdn_small.py"

Each argument is `NAME: ARGUMENTS OF train.py`. One is enough, to find its learning rate. The search
starts at the rate configured, with seed 0 and a share of the tokens. Seeds 1, 2, ... are then
trained at the best one found, which need not be the best for all tokens: a model that starts late
needs a large --share. Finished runs are reused and interrupted ones resumed. All models must share
data, windows and dtype (auto: float32, on a GPU bfloat16). Training tokens may differ, to compare
at equal FLOPs or time.

Writes rates.csv (the loss at each learning rate), compare.csv and compare.md to out_dir. Intervals
are 95% by Student's t. Differences from the first model are paired by seed: runs with the same
seed see the same batches. State: bytes of the fp32 decoding cache after one window.
"""
import re
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import inf
from pathlib import Path

from analysis import figures
from analysis.runs import Run
from bench import one_line, where_and_when
from lm_architectures.data import open_data
from lm_architectures.files import ROOT, UserError, friendly_errors, write_file
from lm_architectures.machine.devices import pick_device, pick_dtype
from lm_architectures.run.checkpoint import checkpoints
from lm_architectures.run.run_settings import config_class, read_settings
from lm_architectures.score.scoring import perplexity
from lm_architectures.settings import check_ranges, load_settings
from train import Settings as TrainSettings

STEP = 1.5  # ratio of neighboring learning rates
SHARE = 1 / 8  # default fraction of the tokens with which learning rates are compared
DIVERGED = 'diverged.txt'  # the error message of a run that diverged, in its folder
SAME = 'data', 'mask_documents', 'block_size', 'eval_tokens', 'eval_seed', 'dtype'  # settings that must be equal


@dataclass
class Settings:
    out_dir: str = 'out/compare'  # folder of the runs and tables
    data: str | None = None  # data of all models; None: from their configs, which must agree
    max_tokens: int | None = None  # training tokens of all models; None: from their configs
    seeds: int = 5  # runs of each model at its best learning rate
    jobs: int = 2  # runs trained at a time, with one thread each
    share: float = SHARE  # fraction of the tokens with which learning rates are compared
    rates_only: bool = False  # only search the learning rates

    def __post_init__(self):
        check_ranges(self, max_tokens=1, seeds=1, jobs=1, share=(1e-3, 1))


def loss_of(folder: Path) -> float | None:
    """Return the final loss of a run, inf if it diverged, None if it is not finished."""
    try:
        return Run(folder).final_loss()
    except (UserError, OSError):
        return inf if (folder / DIVERGED).exists() else None


def check_same(folder: Path, args: list[str]) -> None:
    """Raise UserError if the folder's run has other settings or data than args."""
    wanted, _, _ = read_settings(TrainSettings, [*args, f'--out_dir={folder}', '--resume'])
    if open_data(wanted.data).sha256 != Run(folder).record['data']['sha256']:
        raise UserError(f'{folder} was trained on data other than {wanted.data}: give another --out_dir')


def train_all(cells: dict[Path, list[str]], jobs: int) -> None:
    """Train {run folder: arguments of train.py}, `jobs` at a time, with one thread each.

    Skips finished runs and resumes interrupted ones. A run that diverges gets a file DIVERGED.
    Raises UserError if a run fails or, before training, if a folder has a run with other settings.
    """
    todo = {folder: args for folder, args in cells.items() if loss_of(folder) is None}
    for folder, args in cells.items():
        if (folder / 'config.json').exists() and (folder not in todo or checkpoints(folder)):
            check_same(folder, args)

    def train(folder):
        resume = '--resume' if checkpoints(folder) else '--overwrite'
        command = [sys.executable, str(ROOT / 'train.py'), *todo[folder], f'--out_dir={folder}', '--threads=1', resume]
        return folder, subprocess.run(command, capture_output=True, text=True)

    pool = ThreadPoolExecutor(jobs)
    try:
        for i, future in enumerate(as_completed([pool.submit(train, folder) for folder in todo]), 1):
            folder, result = future.result()
            if 'the gradients were not finite' in result.stderr:
                folder.mkdir(parents=True, exist_ok=True)  # train.py deletes a run without a logged step
                write_file(folder / DIVERGED, result.stderr.encode())
            if loss_of(folder) is None:
                raise UserError(f'{folder} did not finish: '
                                + (result.stderr.strip()[-1000:] or f'exit status {result.returncode}'))
            print(f'{i}/{len(todo)}  {folder.name}: {loss_of(folder):.4f}', flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C no further run starts


@dataclass
class Method:
    args: list[str]  # arguments of train.py, without learning rate, seed and folder
    prefix: str  # path prefix of its run folders
    rate: float | None = None  # learning rate, or where the search for it starts; None: as configured
    share: float = SHARE  # of the tokens, with seed 0

    def __post_init__(self):
        self.settings, *_ = load_settings(TrainSettings, self.args, config_class)
        self.rate = self.rate or self.settings.learning_rate
        if self.settings.dtype == 'auto':  # in train.py, auto depends on the model's size
            dtype = pick_dtype('auto', pick_device(self.settings.device), big_enough=False)
            self.settings.dtype = str(dtype).removeprefix('torch.')
            self.args = [*self.args, f'--dtype={self.settings.dtype}']

    def run(self, rate: float, seed: int) -> tuple[Path, list[str]]:
        """Return a run's folder and arguments. Seed 0, for choosing the rate, has fewer tokens."""
        fewer = [f'--{key}={int(getattr(self.settings, key) * self.share)}' for key in ('max_tokens', 'warmup_tokens')]
        return (Path(f'{self.prefix}_lr{rate:.3g}_seed{seed}'),
                [*self.args, *(fewer if seed == 0 else []), f'--learning_rate={rate:.3g}', f'--seed={seed}'])


def set_best_rates(methods: dict[str, Method], jobs: int) -> None:
    """Set each method's learning rate to the best one of a search with seed 0.

    Tries three rates, STEP apart, and extends the range until the best is not at its edge. Writes
    rates.csv beside the runs. Raises UserError for a method that diverges at all three.
    """
    losses = {name: {} for name in methods}  # {name: {learning rate: loss}}
    wanted = {name: [method.rate / STEP, method.rate, method.rate * STEP] for name, method in methods.items()}
    while any(wanted.values()):
        cells = {(name, rate): methods[name].run(rate, 0) for name, rates in wanted.items() for rate in rates}
        train_all(dict(cells.values()), jobs)
        for (name, rate), (folder, _) in cells.items():
            losses[name][rate] = loss_of(folder)
        for name, of_rate in losses.items():
            best = min(of_rate, key=of_rate.get)
            if of_rate[best] == inf:
                raise UserError(f'{name} diverges at learning rates of {min(of_rate):.3g} to {max(of_rate):.3g}: give '
                                'a lower learning_rate')
            wanted[name] = [best / STEP] * (best == min(of_rate)) + [best * STEP] * (best == max(of_rate))
            methods[name].rate = best
    folder = Path(next(iter(methods.values())).prefix).parent
    figures.write_csv(folder / 'rates.csv', [{'model': name, 'lr': float(f'{rate:.3g}'), 'loss': loss}
                      for name, of_rate in losses.items() for rate, loss in sorted(of_rate.items())])


def train_seeds(methods: dict[object, Method], seeds: int, jobs: int) -> dict[object, list[Path]]:
    """Train each method at its rate with seeds 1 to `seeds`. Returns {method: run folders}.

    Raises UserError if a run diverges.
    """
    runs = {name: dict(method.run(method.rate, seed) for seed in range(1, seeds + 1))
            for name, method in methods.items()}
    cells = {folder: args for of_method in runs.values() for folder, args in of_method.items()}
    train_all(cells, jobs)
    for folder in cells:
        if loss_of(folder) == inf:
            raise UserError(f'{folder} diverged, at the best learning rate of seed 0: '
                            + (folder / DIVERGED).read_text().strip())
    return {name: list(of_method) for name, of_method in runs.items()}


def read_methods(s: Settings, arguments: list[str]) -> dict[str, Method]:
    """Parse the arguments as {name: method}. Raises UserError if they are not comparable."""
    methods = {}
    for argument in arguments:
        name, colon, command = argument.partition(': ')
        prefix = str(Path(s.out_dir) / re.sub(r'\W+', '_', name))
        if not colon or prefix in [method.prefix for method in methods.values()]:
            raise UserError(f"{argument!r} has {'the name of another model' if colon else 'no name'}: expected "
                            "'NAME: CONFIG --setting=value ...', with distinct names")
        args = shlex.split(command)
        args += [f'--{key}={value}' for key in ('data', 'max_tokens') if (value := getattr(s, key)) is not None]
        methods[name] = Method(args, prefix, share=s.share)
    if not methods:
        raise UserError('which models? python -m analysis.compare "NAME: CONFIG" "NAME: CONFIG" ...')
    (first, reference), *others = methods.items()
    for name, method in others:
        for key in SAME:
            ours, theirs = getattr(reference.settings, key), getattr(method.settings, key)
            if ours != theirs:
                raise UserError(f'{first} has {key} = {ours}, {name} has {theirs}: expected the same for all')
    return methods


def table(runs: dict[str, list[Path]]) -> list[dict]:
    """Compare {name: runs, one per seed} with the first name. Return a row for each.

    Size, state, FLOPs and speed are from the first seed.
    """
    losses = {name: [Run(folder).final_loss() for folder in folders] for name, folders in runs.items()}
    (first, reference), *_ = losses.items()
    rows = []
    for name, values in losses.items():
        run, columns = Run(runs[name][0]), ('minus_first', 'its_low', 'its_high')
        tokens, has_cache = run.settings.max_tokens, getattr(run.model, 'new_cache', None)
        gap = figures.mean_and_interval(figures.paired_gaps(values, reference), *columns)
        rows.append({
            'model': name, 'parameters': run.parameters,
            'state_bytes': run.model.new_cache(1, run.settings.block_size).nbytes if has_cache else None,
            'lr': run.settings.learning_rate, 'tokens': tokens,
            'flops': (run.flops_per_token or 0) * tokens or None, 'tokens_per_s': run.median('tokens_per_s'),
            'seeds': len(values), **figures.mean_and_interval(values, 'loss', 'low', 'high'),
            'perplexity': perplexity(statistics.mean(values)),
            **(dict.fromkeys(columns) if name == first else gap), 'losses': ' '.join(map(repr, values))})
    return rows


def loss_table(rows: list[dict]) -> str:
    """Format the rows of `table` in Markdown. Differences are left out if there is one model."""
    found = []
    for r in rows:
        found.append({
            'model': r['model'], 'parameters': f'{r["parameters"]:,}',
            'bytes of state': '' if r['state_bytes'] is None else f'{r["state_bytes"]:,}', 'lr': f'{r["lr"]:.2g}',
            'tokens': f'{r["tokens"]:,}', 'FLOPs': '' if r['flops'] is None else f'{r["flops"]:.3g}',
            'tokens/s': f'{r["tokens_per_s"]:,.0f}', 'seeds': r['seeds'], 'loss': f'{r["loss"]:.4f}',
            '95%': figures.interval_text(r['low'], r['high']), 'perplexity': f'{r["perplexity"]:.3f}'})
        if r['minus_first'] is not None:  # not the first, whose cells are empty
            found[-1] |= {f'minus {rows[0]["model"]}': f'{r["minus_first"]:+.4f}',
                          '95% of that': figures.interval_text(r['its_low'], r['its_high'], '+')}
    return figures.markdown_table(found)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, arguments, _ = load_settings(Settings, argv)
        methods, out = read_methods(s, arguments), Path(s.out_dir)
        out.mkdir(parents=True, exist_ok=True)
        set_best_rates(methods, s.jobs)
        if s.rates_only:
            return print(f'written to {out}/rates.csv')
        runs = train_seeds(methods, s.seeds, s.jobs)
        rows, first = table(runs), next(iter(methods.values()))
        text = (f'{one_line(where_and_when())}. Data {first.settings.data}, {s.jobs} runs at a time with '
                f'one thread each.\n\n{loss_table(rows)}\n')
        print(text)
        figures.write(out / 'compare', {'.csv': rows, '.md': text})


if __name__ == '__main__':
    main()
