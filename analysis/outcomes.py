"""How runs ended: their final validation loss, their size, and what they are compared with."""
import statistics
from collections.abc import Callable, Set
from pathlib import Path

from analysis.figures import is_number
from analysis.loss_curves import curves_of, flops_per_token, of_each, short_number
from common.files import UserError
from common.runs import blank_run, count_parameters, read_log, read_run
from common.settings import make_settings
from train import Settings as TrainSettings

SAME_SIZE = 1.1  # models are of one size up to so many times the parameters of the smallest


# ---- how runs ended ----

def settings_of(run: str) -> TrainSettings:
    """A run's settings of training."""
    return make_settings(TrainSettings, read_run(run)['settings'], f'in {run}/config.json')


def final_loss(run: str) -> float:
    """The last validation loss of a run, in nats per token. UserError if its training is not at its end."""
    evaluated = [record for record in read_log(run) if is_number(record.get('val')) and is_number(record.get('tokens'))]
    if not evaluated:
        raise UserError(f'{run}: no validation loss was logged')
    tokens, planned = evaluated[-1]['tokens'], settings_of(run).max_tokens
    if tokens < planned:
        raise UserError(f'{run} was last evaluated at {tokens:,} of its {planned:,} tokens: train it to its end, with '
                        f'python train.py --out_dir={run} --resume')
    return evaluated[-1]['val']


def finished(runs: list[str]) -> list[str]:
    """The runs whose training is at its end, one for each seed; of runs that differ in nothing but the seed."""
    seeds = {}

    def check(run):
        final_loss(run)
        seed = settings_of(run).seed
        if seed in seeds:
            raise UserError(f'{run} differs from {seeds[seed]} in nothing, not even in the seed ({seed})')
        seeds[seed] = run
    return list(of_each(runs, check))


def ended(runs: list[str]) -> list[str]:
    """The runs that are `finished`; all of them where none has a log, as imported ones."""
    return finished(runs) if any(map(read_log, runs)) else runs


def final_losses(runs: list[str]) -> list[float]:
    """The final loss of each of the runs that are `finished`."""
    return [final_loss(run) for run in finished(runs)]


def n_parameters(run: str) -> int:
    """The parameters of a run's model, each counted once."""
    return count_parameters(blank_run(run))


def training_flops(run) -> float:
    return flops_per_token(run) * settings_of(run).max_tokens


def core_hours(folder: Path) -> float:
    """Hours of training of all runs in the folder, of one core or GPU each; those at other learning rates count too."""
    logs = [read_log(config.parent) for config in folder.glob('*/config.json')]
    return sum(log[-1]['seconds'] for log in logs if log) / 3600


def cache_bytes(run, n_tokens: int) -> int | None:
    """Bytes of the cache that decoding keeps for so many tokens, in fp32; None for a model without one.

    With what taking back a token needs: a recurrent model keeps the state before it, too.
    """
    model = blank_run(run)
    return model.new_cache(1, n_tokens).nbytes if getattr(model, 'new_cache', None) else None


def speed(run) -> float:
    """Training tokens/s of a run: the median of its log, as a machine may be slow for a while."""
    return statistics.median(record['tokens_per_s'] for record in read_log(run) if 'tokens_per_s' in record)


# ---- what runs are compared with ----

def by_size(runs: list[str]) -> dict[str, list[str]]:
    """{'131.1M': the runs of about so many parameters}, from small to large.

    A size is the parameters of its smallest model. Runs whose size cannot be told are left out, and named on stderr.
    """
    parameters, sizes = of_each(runs, n_parameters), {}
    for run in sorted(parameters, key=parameters.get):
        if not sizes or parameters[run] > SAME_SIZE * max(sizes):
            sizes[parameters[run]] = []
        sizes[max(sizes)].append(run)
    return {short_number(n): [run for run in runs if run in members] for n, members in sizes.items()}


def named(labels, name: str) -> str:
    """The one label that has all that `name` has: 'sps' or 'sps, window=64' are names of 'sps, window=64'."""
    if name in labels:
        return name
    found = [label for label in labels if set(name.split(', ')) <= set(label.split(', '))]
    if len(found) == 1:
        return found[0]
    problem = f'{len(found)} are' if found else 'none is'
    raise UserError(f'{name!r} is to name one of {"; ".join(labels)}: {problem} called so. Give a whole label')


def beside(baseline: str, runs: list[str], curve_of: Callable, besides: Set[str] = frozenset()) -> dict[str, tuple]:
    """{size: ({label: curve_of(the label's runs)}, label of the baseline)}, as `curves_of` at each size.

    A size without the baseline, or with nothing besides, is left out and named on stderr.
    """
    sizes = by_size(runs)

    def compared(size):
        try:
            curves = curves_of(sizes[size], curve_of, besides)
            label = named(curves, baseline)
            if len(curves) < 2:
                raise UserError(f'all runs are {baseline}: give runs of another method too')
        except UserError as error:
            raise UserError(f'{size} parameters: {error}')
        return curves, label
    return of_each(sizes, compared)
