"""Many runs of train.py: a few at a time, none twice, each with its best learning rate.

`train_all` is what the comparisons of this folder train by; `best_rates` brackets a learning rate for each of them,
`train_seeds` trains with every seed, and `train_at_best_rates` does both.
"""
import functools
import subprocess
import sys
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import inf
from pathlib import Path

from analysis.figures import write_csv
from analysis.outcomes import final_loss
from common.checkpoint import checkpoints
from common.files import ROOT, UserError, write_file
from common.machine import pick_device, pick_dtype
from common.run_settings import read_settings
from common.runs import read_run
from data import open_data
from train import Settings as TrainSettings

STEP = 1.5  # ratio of neighbouring learning rates
DIVERGED = 'diverged.txt'  # what train.py said of a run that did, in its folder


def loss_of(folder) -> float:
    """The final loss of a run, inf if it diverged. UserError or OSError if its training is not at its end."""
    try:
        return final_loss(folder)
    except (UserError, OSError):
        if (folder / DIVERGED).exists():
            return inf
        raise


@functools.cache
def checksum(data: str) -> str:
    """Of data by name or folder, as a run's config.json has it."""
    return open_data(data).sha256


def is_done(folder) -> bool:
    """Whether the run in the folder was trained to its end, and evaluated there, or diverged."""
    try:
        loss_of(folder)
    except (UserError, OSError):
        return False
    return True


def check_same(folder, args: list[str]) -> None:
    """Raise UserError if the run in the folder was started with other settings or on other data than args say."""
    asked, _, _ = read_settings(TrainSettings, [*args, f'--out_dir={folder}', '--resume'])
    if checksum(asked.data) != read_run(folder)['data']['sha256']:
        raise UserError(f'{folder} was trained on other data than {asked.data}: give another --out_dir')


def one_dtype(device: str = 'auto', big_enough: bool = False) -> str:
    """What `--dtype=auto` is here, for all runs that are compared: `auto` gives large models another than small ones.

    big_enough: whether all of them are large (`pick_dtype`).
    """
    return str(pick_dtype('auto', pick_device(device), big_enough))[6:]


def train_all(cells: dict[Path, list[str]], jobs: int, may_diverge: bool = False) -> None:
    """Trains {run folder: arguments of train.py}, `jobs` at a time with one thread each.

    A run that is done is left alone, one that was interrupted goes on. Raises UserError for the first that fails or is
    stopped, or diverges unless it may; and before any training if one that is there was trained otherwise.
    """
    todo = {folder: args for folder, args in cells.items() if not is_done(folder)}
    for folder, args in cells.items():
        if folder not in todo or checkpoints(folder):
            check_same(folder, args)
    start = time.perf_counter()

    def train(folder):
        start_or_go_on = '--resume' if checkpoints(folder) else '--overwrite'
        command = [sys.executable, 'train.py', *todo[folder], f'--out_dir={folder.absolute()}', '--threads=1',
                   start_or_go_on]
        return folder, subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    pool = ThreadPoolExecutor(jobs)
    try:
        for i, future in enumerate(as_completed([pool.submit(train, folder) for folder in todo]), 1):
            folder, result = future.result()
            if 'the gradients were not finite' in result.stderr:
                write_file(folder / DIVERGED, result.stderr.encode())
            if not is_done(folder):
                raise UserError(f'{folder} did not come to its end: {result.stderr.strip()[-1000:]}')
            print(f'{time.perf_counter() - start:6.0f} s  {i}/{len(todo)}  {folder.name}: {loss_of(folder):.4f}',
                  flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C what waits is not begun
    for folder in cells if not may_diverge else []:
        if loss_of(folder) == inf:
            raise UserError(f'{folder} diverged, at the best learning rate of the first seed: '
                            + (folder / DIVERGED).read_text().strip())


def best_rates(methods: dict[str, list[str]], first: dict[str, float], folder_of, jobs: int) -> dict[str, float]:
    """{method: its best learning rate}, with a worse one on both sides.

    methods: {name: arguments of train.py}; first: {name: where to look first}; folder_of(name, rate): the run's folder.
    Three rates, STEP apart, and as many more as it takes until the best is not the last on either side. rates.csv
    beside the runs has the loss at each, of the methods of the last call. UserError for a method that diverges at all
    three.
    """
    losses = {name: {} for name in methods}  # by exponent of STEP

    def folder(name, i):
        return folder_of(name, first[name] * STEP ** i)

    wanted = {name: [-1, 0, 1] for name in methods}
    while any(wanted.values()):
        cells = {folder(name, i): [*methods[name], f'--learning_rate={first[name] * STEP ** i:.3g}']
                 for name, exponents in wanted.items() for i in exponents}
        train_all(cells, jobs, may_diverge=True)
        for name, exponents in wanted.items():
            losses[name] |= {i: loss_of(folder(name, i)) for i in exponents}
            best = min(losses[name], key=losses[name].get)
            if losses[name][best] == inf:
                raise UserError(f'{name} diverges at learning rates of {first[name] / STEP:.3g} to '
                                f'{first[name] * STEP:.3g}: begin lower')
            wanted[name] = [i for i in (best - 1, best + 1) if i not in losses[name]]
    write_csv(folder(next(iter(methods)), 0).parent / 'rates.csv',
              [{'model': name, 'lr': float(f'{first[name] * STEP ** i:.3g}'), 'loss': loss}
               for name, of_name in losses.items() for i, loss in sorted(of_name.items())])
    return {name: first[name] * STEP ** min(losses[name], key=losses[name].get) for name in methods}


def train_seeds(methods: dict, rates: dict, folder_of, seeds: int, jobs: int) -> dict[object, list[Path]]:
    """{method: its runs, one a seed}, each at its learning rate. folder_of(method, rate, seed): the run's folder."""
    runs = {name: [folder_of(name, rates[name], seed) for seed in range(1, seeds + 1)] for name in methods}
    train_all({run: [*methods[name], f'--learning_rate={rates[name]:.3g}', f'--seed={seed}']
               for name, folders in runs.items() for seed, run in enumerate(folders, 1)}, jobs)
    return runs


def train_at_best_rates(methods: dict[str, list[str]], first: dict[str, float], folder_of, seeds: int,
                        jobs: int, fixed: Set[str] = frozenset()) -> dict[str, list[Path]]:
    """{method: its runs, one a seed}, at the best learning rate of the first seed. Arguments as of `best_rates`.

    folder_of(name, rate, seed): the run's folder. The methods in `fixed` train at their first rate alone.
    """
    searched = {name: [*args, '--seed=1'] for name, args in methods.items() if name not in fixed}
    rates = dict(first)
    if searched:
        rates |= best_rates(searched, first, lambda name, rate: folder_of(name, rate, 1), jobs)
    return train_seeds(methods, rates, folder_of, seeds, jobs)
