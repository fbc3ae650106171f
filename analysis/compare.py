"""Models side by side: the same tokens, each at its own best learning rate, over seeds.

    python -m analysis.compare --out_dir=out/gpn_or_gdn "GPN: config/gpn_quick.py" "GDN: config/gdn_quick.py"

An argument is NAME: and what would follow `python train.py`. The learning rate of each is bracketed around its own at
the first seed, then it trains with every seed. Runs that are done are not trained again, one that was interrupted goes
on. All train on the same data for the same tokens: --data and --max_tokens, where given, hold for all. All have one
dtype: where it is auto, float32, on a GPU bfloat16, as auto may differ between models of different sizes.

Writes compare.csv and compare.md in out_dir: final validation loss with its 95% interval (Student's t), perplexity, and
the difference to the first with Welch's interval. The state is what decoding keeps after a window of tokens, in fp32,
and what taking back one of them needs.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import re
import shlex
import statistics
from dataclasses import dataclass
from math import inf
from pathlib import Path

from analysis.figures import write_csv
from analysis.outcomes import cache_bytes, final_loss, n_parameters, settings_of, speed
from analysis.seeds import between, difference, interval
from analysis.sweep import one_dtype, train_at_best_rates
from bench import markdown_table, one_line, where_and_when
from common.files import UserError, friendly_errors, write_file
from common.runs import model_file
from common.settings import check_ranges, load_settings
from common.validation import perplexity
from train import Settings as TrainSettings


@dataclass
class Settings:
    out_dir: str = 'out/compare'  # of the runs and of what is written
    data: str | None = None  # folder of prepare_fineweb.py or built-in data; None: as each says, the same for all
    max_tokens: int | None = None  # training tokens; None: as each says, the same for all
    seeds: int = 3  # runs of each, at its best learning rate
    jobs: int = 2  # runs at a time, one thread each

    def __post_init__(self):
        check_ranges(self, max_tokens=(1, inf), seeds=(1, inf), jobs=(1, inf))


@dataclass
class Side:
    args: list[str]  # of train.py, but for learning rate, seed and folder
    rate: float  # learning rate to look at first
    same: dict  # what all sides must have in common: data, tokens of training and of the loss, windows, dtype
    folder: str  # how the names of its runs begin


def read_sides(s: Settings, arguments: list[str]) -> dict[str, Side]:
    """{name: side} of 'NAME: what follows train.py' each; UserError for what cannot be compared."""
    sides = {}
    for argument in arguments:
        name, colon, command = argument.partition(': ')
        if not colon or name in sides:
            raise UserError(f"{argument!r} has {'the name of another' if colon else 'no name'}: expected 'NAME: CONFIG "
                            "--setting=value ...'")
        args = shlex.split(command)
        args += [f'--{key}={value}' for key in ('data', 'max_tokens') if (value := getattr(s, key)) is not None]
        settings, _, given = load_settings(TrainSettings, args, lambda model: model_file(model).Config)
        taken = [key for key in ('seed', 'out_dir') if key in given]
        if taken:
            raise UserError(f'{name}: {taken[0]} is given for each run here: leave it out')
        if settings.dtype == 'auto':
            settings.dtype = one_dtype(settings.device)
            args.append(f'--dtype={settings.dtype}')
        folder = re.sub(r'\W+', '_', name)
        if folder in (side.folder for side in sides.values()):
            raise UserError(f'{name!r} names its runs {folder}, as another does: give it another name')
        same = {key: getattr(settings, key) for key in (
            'data', 'documents', 'max_tokens', 'block_size', 'eval_tokens', 'eval_seed', 'dtype')}
        sides[name] = Side(args, settings.learning_rate, same, folder)
    if len(sides) < 2:
        raise UserError('what is to be compared? python -m analysis.compare "NAME: CONFIG" "NAME: CONFIG" ...')
    (first, reference), *others = sides.items()
    for name, side in others:
        for key, value in reference.same.items():
            if side.same[key] != value:
                raise UserError(f'{first} has {key} = {value}, {name} has {side.same[key]}: expected one for all')
    return sides


def train_sides(s: Settings, sides: dict[str, Side]) -> dict[str, list[Path]]:
    """Trains all that is not done yet: {name: runs, one a seed}."""
    out = Path(s.out_dir)
    out.mkdir(parents=True, exist_ok=True)

    def folder(name, rate, seed):
        return out / f'{sides[name].folder}_lr{rate:.3g}_seed{seed}'
    return train_at_best_rates({name: side.args for name, side in sides.items()},
                               {name: side.rate for name, side in sides.items()}, folder, s.seeds, s.jobs)


def table(runs: dict[str, list[Path]]) -> list[dict]:
    """A row of each of {name: its runs, one a seed}; size, state and speed are of the first seed.

    The first name is what the others are compared with.
    """
    losses = {name: [final_loss(run) for run in folders] for name, folders in runs.items()}
    reference, *_ = losses.values()
    rows = []
    for name, values in losses.items():
        run, loss, (low, high) = runs[name][0], statistics.mean(values), interval(values)
        settings = settings_of(run)
        row = {'model': name, 'parameters': n_parameters(run), 'state_bytes': cache_bytes(run, settings.block_size),
               'lr': settings.learning_rate, 'tokens': settings.max_tokens, 'tokens_per_s': speed(run),
               'seeds': len(values), 'loss': loss, 'low': low, 'high': high, 'perplexity': perplexity(loss),
               'minus_first': None, 'its_low': None, 'its_high': None, 'losses': ' '.join(map(repr, values))}
        if values is not reference:
            row['minus_first'], row['its_low'], row['its_high'] = difference(values, reference)
        rows.append(row)
    return rows


def markdown(rows: list[dict], about: str) -> str:
    """The table as Markdown, after a line that says where and when, and `about` it."""
    shown = [{'model': r['model'], 'parameters': f'{r["parameters"]:,}',
              'bytes of state': '' if r['state_bytes'] is None else f'{r["state_bytes"]:,}', 'lr': f'{r["lr"]:.2g}',
              'tokens': f'{r["tokens"]:,}', 'tokens/s': f'{r["tokens_per_s"]:,.0f}', 'seeds': r['seeds'],
              'loss': f'{r["loss"]:.4f}', '95%': between(r['low'], r['high']), 'perplexity': f'{r["perplexity"]:.3f}',
              f'minus {rows[0]["model"]}': '' if r['minus_first'] is None else f'{r["minus_first"]:+.4f}',
              '95% of that': between(r['its_low'], r['its_high'], '+')} for r in rows]
    return f'{one_line(where_and_when())}. {about}\n\n{markdown_table(shown)}\n'


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, arguments, _ = load_settings(Settings, argv)
        sides = read_sides(s, arguments)
        rows = table(train_sides(s, sides))
        side, *_ = sides.values()
        text = markdown(rows, f'Data {side.same["data"]}, {s.jobs} runs at a time, one thread each.')
        write_csv(Path(s.out_dir) / 'compare.csv', rows)
        write_file(Path(s.out_dir) / 'compare.md', text.encode())
        print(f'{text}\nwritten to {s.out_dir}/compare.md and .csv')


if __name__ == '__main__':
    main()
