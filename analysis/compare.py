"""Train and compare models with several seeds, each at a learning rate found by a search.

    python -m analysis.compare --out_dir=out/a "GPN: config/gpn_small.py" "GDN: config/gdn_small.py"
    python -m analysis.compare --out_dir=out/b --equal=flops "A: ..." "B: ..."
    python -m analysis.compare --out_dir=out/c --sweep=window=16,32,64 --seeds=2 "SPS: ..."

Each argument is `NAME: ARGUMENTS OF train.py`. One is enough, to find its learning rate. The search
starts at the rate configured, with seed 0 and a share of the tokens. Seeds 1, 2, ... are then
trained at the best one found, which need not be the best for all tokens: a model that starts late
needs a large --share. Finished runs are reused and interrupted ones resumed. All models must share
data, windows and dtype (auto: float32, on a GPU bfloat16). --equal=flops or time gives each model
as many tokens as the first one's training FLOPs or time allow. For time, the other models train all
seeds twice: first with their own tokens, to measure their speed.

Writes rates.csv (the loss at each learning rate), compare.csv, compare.md and compare.png to
out_dir: see `python -m analysis final`. Runs with the same seed see the same batches, so
differences from the first model are paired by seed.

--sweep trains each model at each of these values of a setting instead, with seeds 1, 2, ... and all
tokens. Writes NAME.csv and NAME.png, named after the setting.
"""
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal

import pandas as pd

from analysis import commands, figures
from analysis.runs import last_evaluation, read_runs
from bench.reporting import where_and_when
from lm_architectures import train
from lm_architectures.data import open_data
from lm_architectures.files import ROOT, UserError, friendly_errors, write_file
from lm_architectures.machine.devices import pick_device, pick_dtype
from lm_architectures.run.checkpoint import checkpoints
from lm_architectures.run.folders import read_run
from lm_architectures.run.records import read_log
from lm_architectures.run.run_settings import read_settings
from lm_architectures.settings import check_ranges, load_settings

STEP = 1.5  # ratio of neighboring learning rates
MOST_RATES = 16  # of a model in the search: 1.5 ** 14, a factor of 290, from where it starts
DIVERGED = 'diverged.txt'  # the error message of a run that diverged, in its folder
SAME = 'data', 'mask_documents', 'block_size', 'eval_tokens', 'eval_seed', 'dtype'  # settings that must be equal


@dataclass
class Settings:
    out_dir: str = 'out/compare'  # folder of the runs and tables
    data: str | None = None  # data of all models; None: from their configs, which must agree
    max_tokens: int | None = None  # training tokens of all models; None: from their configs
    equal: Literal['tokens', 'flops', 'time'] = 'tokens'  # flops, time: tokens follow from those of the first model
    seeds: int = 5  # runs of each model at its best learning rate
    jobs: int = 2  # runs trained at a time, with one thread each
    share: float = 1 / 8  # fraction of the tokens with which learning rates are compared
    rates_only: bool = False  # only search the learning rates
    sweep: str | None = None  # NAME=VALUE,VALUE,...: instead of a search, train at each value of this setting

    def __post_init__(self):
        check_ranges(self, max_tokens=1, seeds=1, jobs=1, share=(1e-3, 1))
        if self.sweep and (self.rates_only or self.equal != 'tokens' or self.sweep.startswith('seed=')):
            raise UserError('sweep does no search: give a setting other than seed (use seeds), no rates_only or equal')


# ---- one run ----

def loss_of(folder: Path) -> float | None:
    """Return the final loss of a run, inf if it diverged, None if it is not finished."""
    if (folder / DIVERGED).exists():
        return inf
    if not (folder / 'config.json').exists():
        return None
    last = last_evaluation(read_log(folder))
    return last['val'] if last.get('tokens', 0) >= read_run(folder)['settings']['max_tokens'] else None


def train_all(cells: dict[Path, list[str]], jobs: int) -> None:
    """Train {run folder: arguments of train.py}, `jobs` at a time, with one thread each.

    Skips finished runs and resumes interrupted ones. A run that diverges gets a file DIVERGED.
    Raises UserError if a run fails or, before training, if a folder has a run with other settings.
    """
    # a run that diverged before its first log line has no settings to compare: it is trained again
    todo = {folder: args for folder, args in cells.items()
            if loss_of(folder) is None or not (folder / 'config.json').exists()}
    for folder, args in cells.items():
        if (folder / 'config.json').exists() and (folder not in todo or checkpoints(folder)):
            wanted, *_ = read_settings(train.Settings, [*args, f'--out_dir={folder}', '--resume'])  # compares them
            if open_data(wanted.data).sha256 != read_run(folder)['data']['sha256']:
                raise UserError(f'{folder} was trained on data other than {wanted.data}: give another --out_dir')

    def trained(folder):
        (folder / DIVERGED).unlink(missing_ok=True)
        resume = '--resume' if checkpoints(folder) else '--overwrite'
        command = [sys.executable, str(ROOT / 'train.py'), *todo[folder], f'--out_dir={folder}', '--threads=1', resume]
        return folder, subprocess.run(command, capture_output=True, text=True)

    pool = ThreadPoolExecutor(jobs)
    try:
        for i, future in enumerate(as_completed([pool.submit(trained, folder) for folder in todo]), 1):
            folder, result = future.result()
            if 'the gradients were not finite' in result.stderr:
                folder.mkdir(parents=True, exist_ok=True)  # a run without a logged step has no folder
                write_file(folder / DIVERGED, result.stderr.encode())
            if loss_of(folder) is None:
                raise UserError(f'{folder} did not finish: '
                                + (result.stderr.strip()[-1000:] or f'exit status {result.returncode}'))
            print(f'{i}/{len(todo)}  {folder.name}: {loss_of(folder):.4f}', flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C no further run starts


# ---- one model ----

@dataclass
class Method:
    args: list[str]  # arguments of train.py, without learning rate, seed and folder
    prefix: str  # path prefix of its run folders
    share: float  # of the tokens, with seed 0

    def __post_init__(self):
        self.settings, *_ = read_settings(train.Settings, self.args)
        self.rate = self.settings.learning_rate  # where the search starts, then the best
        if self.settings.dtype == 'auto':  # in train.py, auto depends on the model's size
            dtype = pick_dtype('auto', pick_device(self.settings.device))
            self.settings = replace(self.settings, dtype=str(dtype).removeprefix('torch.'))
            self.args = [*self.args, f'--dtype={self.settings.dtype}']

    def run(self, seed: int, rate: float | None = None) -> tuple[Path, list[str]]:
        """Return a run's folder and arguments. Seed 0, for choosing the rate, has fewer tokens."""
        fewer = [f'--{key}={int(getattr(self.settings, key) * self.share)}' for key in ('max_tokens', 'warmup_tokens')]
        rate = f'{rate or self.rate:.3g}'
        return (Path(f'{self.prefix}_lr{rate}_seed{seed}'),
                [*self.args, *(fewer if seed == 0 else []), f'--learning_rate={rate}', f'--seed={seed}'])

    def with_tokens(self, tokens: float, name: str) -> 'Method':
        """Return the method at its best rate with other training tokens, in whole steps."""
        s, per_step = self.settings, self.settings.tokens_per_step
        tokens = max(1, round(tokens / per_step)) * per_step
        warmup = s.warmup_tokens * tokens // s.max_tokens
        args = f'--max_tokens={tokens}', f'--warmup_tokens={warmup}', f'--learning_rate={self.rate}'
        return Method([*self.args, *args], f'{self.prefix}_{name}', self.share)


def set_best_rates(methods: dict[str, Method], jobs: int) -> pd.DataFrame:
    """Set each method's learning rate to the best one of a search with seed 0. Return the losses.

    Tries three rates, STEP apart, and extends the range until the best is not at its edge, up to
    MOST_RATES.
    """
    losses = {name: {} for name in methods}  # {name: {learning rate: loss}}
    wanted = {name: [method.rate / STEP, method.rate, method.rate * STEP] for name, method in methods.items()}
    while any(wanted.values()):
        cells = {(name, rate): methods[name].run(0, rate) for name, rates in wanted.items() for rate in rates}
        train_all(dict(cells.values()), jobs)
        for (name, rate), (folder, _) in cells.items():
            losses[name][rate] = loss_of(folder)
        for name, found in losses.items():
            rates, best = sorted(found), min(found, key=found.get)
            if found[best] == inf:
                raise UserError(f'{name} diverges at learning rates of {rates[0]:.3g} to {rates[-1]:.3g}: configure a '
                                'lower one')
            wanted[name] = [best / STEP] * (best == rates[0]) + [best * STEP] * (best == rates[-1])
            if wanted[name] and len(rates) >= MOST_RATES:
                raise UserError(f'{name}: of {len(rates)} learning rates, {rates[0]:.3g} to {rates[-1]:.3g}, the best '
                                f'is {best:.3g}, at the edge: configure one near it')
            methods[name].rate = best
    return pd.DataFrame([{'model': name, 'lr': float(f'{rate:.3g}'), 'loss': loss}
                         for name, found in losses.items() for rate, loss in sorted(found.items())])


def train_seeds(methods: dict[str, Method], s: Settings) -> pd.DataFrame:
    """Train seeds 1, 2, ... at each method's rate. Returns the table of runs, labeled by name."""
    cells, label_of = {}, {}
    for name, method in methods.items():
        of_method = dict(method.run(seed) for seed in range(1, s.seeds + 1))
        cells |= of_method
        label_of |= {str(folder): name for folder in of_method}
    train_all(cells, s.jobs)
    for folder in [folder for folder in cells if loss_of(folder) == inf]:
        raise UserError(f'{folder} diverged, at the best learning rate of seed 0: '
                        + (folder / DIVERGED).read_text().strip())
    runs = read_runs([*label_of])
    return runs.assign(label=runs.folder.map(label_of))


def sweep(methods: dict[str, Method], s: Settings) -> None:
    """Train each model with each value of s.sweep, and seeds 1, 2, ... Writes and draws losses."""
    key, _, texts = s.sweep.partition('=')
    cells, rows = {}, {}
    for name, method in methods.items():
        for text in texts.split(','):
            args = [*method.args, f'--{key}={text}']
            settings, of_model, _ = read_settings(train.Settings, args)
            value = (vars(settings) | of_model)[key]
            for seed in range(1, s.seeds + 1):
                folder = Path(method.prefix + re.sub(r'[^\w.-]', '_', f'_{key}{value}_seed{seed}'))
                cells[folder], rows[folder] = [*args, f'--seed={seed}'], {'label': name, key: value, 'seed': seed}
    print(f'{len(cells)} runs; finished ones are reused', flush=True)
    train_all(cells, s.jobs)
    runs = pd.DataFrame(rows.values(), dtype=object).assign(y=[*map(loss_of, rows)])
    figures.write(Path(s.out_dir) / key, commands.over(runs, commands.Final(x=key)))


def at_equal_cost(methods: dict[str, Method], s: Settings) -> dict[str, Method]:
    """Return the methods with as many tokens as the first one's FLOPs or time allow."""
    if s.equal == 'tokens':
        return methods
    if s.equal == 'flops':
        cost = {name: read_runs([method.run(0)[0]]).flops_per_token[0] for name, method in methods.items()}
        for name in [name for name, flops in cost.items() if flops is None]:
            raise UserError(f'{name} has no FLOPs: its model needs flops_per_token (docs/own_model.md)')
    else:  # seconds a token, of the fastest seed
        cost = 1 / train_seeds(methods, s).groupby('label').tokens_per_s.max()
    first, own = next((name, method.settings) for name, method in methods.items())
    budget = own.n_steps * own.tokens_per_step * cost[first]  # whole steps, as trained
    return {name: method if name == first else method.with_tokens(budget / cost[name], s.equal)
            for name, method in methods.items()}


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
        methods[name] = Method(args, prefix, s.share)
    if not methods:
        raise UserError('which models? python -m analysis.compare "NAME: CONFIG" "NAME: CONFIG" ...')
    (first, reference), *others = methods.items()
    for name, method in others:
        for key in SAME:
            ours, theirs = getattr(reference.settings, key), getattr(method.settings, key)
            if ours != theirs:
                raise UserError(f'{first} has {key} = {ours}, {name} has {theirs}: expected the same for all')
    return methods


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, arguments, _ = load_settings(Settings, argv)
        methods, out = read_methods(s, arguments), Path(s.out_dir)
        out.mkdir(parents=True, exist_ok=True)
        if s.sweep:
            return sweep(methods, s)
        n = len(methods)
        later = 0 if s.rates_only else s.seeds * (2 * n - 1 if s.equal == 'time' else n)
        print(f'first the learning rates: 3 to {MOST_RATES} runs of each model, on {s.share:.3g} of the tokens. Then '
              f'{later} runs of seeds. At most {n * MOST_RATES + later} in all; finished ones are reused', flush=True)
        figures.write(out / 'rates', {'.csv': set_best_rates(methods, s.jobs)})
        if s.rates_only:
            return
        runs = commands.with_values(train_seeds(at_equal_cost(methods, s), s), 'val')
        written = commands.side_by_side(runs, commands.Final())
        is_on_gpu = pick_device(next(iter(methods.values())).settings.device) == 'cuda'
        about = '{device}; {date}; commit {commit}; {versions}. '.format(**where_and_when(is_on_gpu, s.jobs))
        about += f'{s.jobs} runs at a time with one thread each.\n\n'
        figures.write(out / 'compare', written | {'.md': about + written['.md']})


if __name__ == '__main__':
    main()
