"""Where the predict stream of SPS should fork: loss at equal tokens, and at equal FLOPs.

    python -m analysis.forks --data=python_docs --n_layer=4 --out_dir=out/forks_python_docs_4

Trains Standard, SPS, SPS whose rho starts from its token, and forks (`predict_input = 'state'`) whose top 1, 2, ...
layers have two streams, on the same tokens; and Standard on up to twice as many, which is what SPS costs. Each has its
learning rate bracketed at the first seed, then trains with every seed. Runs that are done are not trained again.

Writes forks.csv, forks.md and forks.png in out_dir. A row has the loss and what Standard reaches with as many FLOPs:
linear in the logarithm of FLOPs between its budgets and a little beyond, one line a seed. The interval of their
difference is Welch's, 95%.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from analysis.figures import new_figure, save_figure, write_csv
from analysis.outcomes import final_loss, settings_of, training_flops
from analysis.seeds import difference
from analysis.sweep import STEP, one_dtype, train_at_best_rates
from bench import markdown_table
from common.files import UserError, friendly_errors, write_file
from common.settings import load_settings

BUDGETS = 1, 1.25, 1.5, 2  # Standard's tokens, over those of the others
BEYOND = 1.05  # times the largest of them


@dataclass
class Settings:
    out_dir: str = 'out/forks'  # of the runs and of what is drawn
    config: str = 'config/quickstart.py'  # settings of all runs
    data: str = 'python_docs'  # folder of prepare_fineweb.py or built-in data
    n_layer: int = 4  # depth of all models
    n_embd: int = 128  # their width, in heads of 32
    max_tokens: int = 1_500_000  # training tokens
    seeds: int = 3  # runs of each model, at its best learning rate
    jobs: int = 2  # runs at a time, one thread each


def methods(s) -> dict[str, tuple[list[str], float]]:
    """{name: (arguments of train.py, the learning rate to look at first)}

    The rates are for a width of 128; elsewhere they go as 1 / width, in whole STEPs.
    """
    scale = STEP ** round(math.log(128 / s.n_embd, STEP))
    forks = sorted({1, 2, s.n_layer // 2} - {s.n_layer})
    found = {f'Standard, {budget:g} x tokens': (['--model=standard', f'--max_tokens={round(budget * s.max_tokens)}'],
                                                1.35e-3 * scale) for budget in BUDGETS}
    found |= {f'fork, top {n}': (['--model=sps', '--predict_input=state', f'--predict_layers={n}'], 1.35e-3 * scale)
              for n in forks}
    found |= {'fork, all layers (token)': (['--model=sps', '--predict_input=token'], 9e-4 * scale),
              'SPS': (['--model=sps'], 1.35e-3 * scale)}
    return found


def arguments(s, args: list[str]) -> list[str]:
    """All arguments of train.py but for learning rate, seed and folder."""
    return [s.config, f'--data={s.data}', f'--n_layer={s.n_layer}', f'--n_embd={s.n_embd}',
            f'--n_head={s.n_embd // 32}', f'--max_tokens={s.max_tokens}', f'--dtype={one_dtype()}',
            '--eval_interval=1_000_000', '--sample_tokens=0', *args]


def at_flops(points: list[tuple[float, float]], x: float) -> float | None:
    """The loss at x FLOPs between (FLOPs, loss) points, linear in the logarithm of FLOPs; None outside.

    The last line goes on a little (BEYOND): two streams in all layers may cost that much more than twice.
    """
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1 * (BEYOND if (x1, y1) == points[-1] else 1):
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return None


def table(runs: dict[str, list[Path]]) -> list[dict]:
    """A row a method of {name: its runs, one a seed}; the first methods are Standard, by budget."""
    losses = {name: [final_loss(run) for run in folders] for name, folders in runs.items()}
    costs = {name: training_flops(folders[0]) for name, folders in runs.items()}
    standard = [name for name in runs if name.startswith('Standard')]
    rows = []
    for name, values in losses.items():
        row = {'model': name, 'lr': settings_of(runs[name][0]).learning_rate, 'seeds': len(values),
               'loss': statistics.mean(values), 'lowest': min(values), 'highest': max(values),
               'flops': costs[name] / costs[standard[0]], **dict.fromkeys(('standard', 'difference', 'low', 'high'))}
        beside = [at_flops([(costs[budget], losses[budget][i]) for budget in standard], costs[name])
                  for i in range(len(values))]
        if None not in beside:
            gap, low, high = difference(values, beside)
            row |= {'standard': statistics.mean(beside), 'difference': gap}
            if name not in standard:
                row |= {'low': low, 'high': high}
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    return markdown_table([{
        'model': r['model'], 'FLOPs': f'{r["flops"]:.2f}', 'lr': f'{r["lr"]:.2g}',
        'loss (lowest to highest)': f'{r["loss"]:.4f} ({r["lowest"]:.4f} to {r["highest"]:.4f})',
        'Standard at its FLOPs': '' if r['standard'] is None else f'{r["standard"]:.4f}',
        'difference (95%)': ('' if r['low'] is None else
                             f'{r["difference"]:+.4f} ({r["low"]:+.4f} to {r["high"]:+.4f})')} for r in rows]) + '\n'


def plot(rows: list[dict], path) -> None:
    figure, axes = new_figure(figsize=(6.5, 4.5))
    standard = [r for r in rows if r['model'].startswith('Standard')]
    axes.plot([r['flops'] for r in standard], [r['loss'] for r in standard], color='C0')
    for i, r in enumerate(rows):
        is_standard = r in standard
        label = None if is_standard and r is not standard[0] else 'Standard' if is_standard else r['model']
        error = [[r['loss'] - r['lowest']], [r['highest'] - r['loss']]]
        colour = 'C0' if is_standard else f'C{i - len(standard) + 1}'
        axes.errorbar(r['flops'], r['loss'], error, marker='o', markersize=4, capsize=3, color=colour, linestyle='',
                      label=label)
    axes.set(xlabel="training FLOPs, over Standard's on the same tokens", ylabel='validation loss, nats per token')
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.forks --data=FOLDER --out_dir=NEW')
        out = Path(s.out_dir)
        out.mkdir(parents=True, exist_ok=True)

        def folder(name, rate, seed):
            short = name.replace(',', '').replace(' (token)', '').replace(' ', '_')
            return out / f'{short}_lr{rate:.3g}_seed{seed}'
        args = {name: arguments(s, own) for name, (own, _) in methods(s).items()}
        rows = table(train_at_best_rates(args, {name: rate for name, (_, rate) in methods(s).items()}, folder, s.seeds,
                                         s.jobs))
        write_csv(out / 'forks.csv', rows)
        write_file(out / 'forks.md', markdown(rows).encode())
        plot(rows, out / 'forks.png')
        print(markdown(rows) + f'written to {out}/forks.md, .csv and .png')


if __name__ == '__main__':
    main()
