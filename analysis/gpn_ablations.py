"""What each part of a GPN adds: GPN and the five models of gpn_edits.py, each with one of its equations edited.

    python -m analysis.gpn_ablations --out_dir=out/gpn_ablations

All train on the same tokens, with the same settings and every seed. Runs that are done are not trained again, one that
was interrupted goes on. Writes gpn_ablations.csv and gpn_ablations.md in out_dir: the mean final validation loss with
its 95% interval (Student's t), and the difference to GPN with Welch's.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import statistics
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from analysis.figures import write_csv
from analysis.outcomes import final_loss
from analysis.seeds import between, difference, interval
from analysis.sweep import train_all
from bench import markdown_table
from common.files import UserError, friendly_errors, write_file
from common.runs import make_config, model_file, read_run, saved_config
from common.settings import check_ranges, load_settings

NAMES = {'GPN': 'gpn', 'gate at 1': 'gpn.GateAtOne', 'no grounding': 'gpn.NoGrounding',
         'key from this state': 'gpn.KeyFromThisState', 'no write gate': 'gpn.NoWriteGate', 'no decay': 'gpn.NoDecay'}


@dataclass
class Settings:
    out_dir: str = 'out/gpn_ablations'  # of the runs and of the table
    data: str = 'python_docs'  # folder of prepare_fineweb.py or built-in data
    n_head: int = 4  # memory heads, of 16 x 32
    n_embd: int = 128  # width of the state; the embedding has half of it
    block_size: int = 128  # tokens of a window, through which the gradient goes back
    batch_size: int = 32  # windows of a step; the loop takes hardly longer for many than for few
    max_tokens: int = 1_000_000  # training tokens
    learning_rate: float = 3e-3  # peak, the same for all
    seeds: int = 3  # runs of each
    jobs: int = 1  # runs at a time, one thread each

    def __post_init__(self):
        at_least_1 = (1, float('inf'))
        check_ranges(self, **{f.name: at_least_1 for f in fields(self) if f.type is int})


def arguments(s: Settings) -> list[str]:
    """Of train.py, but for model, seed and folder."""
    own = {name: value for name, value in asdict(s).items() if name not in ('out_dir', 'seeds', 'jobs')}
    return ['config/gpn_quick.py', *(f'--{name}={value}' for name, value in own.items()), f'--d_emb={s.n_embd // 2}',
            f'--micro_batch_size={s.batch_size}', '--d_k=16', '--d_v=32', '--dtype=float32',
            f'--warmup_tokens={s.max_tokens // 20}', '--eval_interval=1_000_000', '--eval_tokens=100_000',
            '--sample_tokens=0']


def weights_in_use(run) -> int:
    """The weights of a run's model that get a gradient: an edit may leave some out."""
    record = read_run(run)
    config = make_config(record['model'], asdict(saved_config(record, run)) | {'scan': 'loop'})
    model = model_file(record['model']).Model(config)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    model(tokens, tokens)['loss'].backward()
    return sum(p.numel() for p in model.parameters() if p.grad is not None)


def table(runs: dict[str, list[Path]]) -> list[dict]:
    """A row of each of {name: its runs, one a seed}; the first is what the others are compared with."""
    losses = {name: [final_loss(run) for run in folders] for name, folders in runs.items()}
    reference, *_ = losses.values()
    rows = []
    for name, values in losses.items():
        low, high = interval(values)
        row = {'model': name, 'weights in use': weights_in_use(runs[name][0]), 'seeds': len(values),
               'loss': statistics.mean(values), 'low': low, 'high': high,
               'minus GPN': 0.0, 'its low': None, 'its high': None}
        if values is not reference:
            row['minus GPN'], row['its low'], row['its high'] = difference(values, reference)
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    """The table as Markdown."""
    return markdown_table([{
        'model': r['model'], 'weights in use': f'{r["weights in use"]:,}', 'seeds': r['seeds'],
        'nats per token': f'{r["loss"]:.4f}', '95% interval': between(r['low'], r['high']),
        'minus GPN': f'{r["minus GPN"]:+.4f}', '95% interval of that': between(r['its low'], r['its high'], '+'),
    } for r in rows]) + '\n'


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, sys.argv[1:] if argv is None else argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.gpn_ablations --out_dir=NEW')
        out = Path(s.out_dir)
        out.mkdir(parents=True, exist_ok=True)
        runs = {name: [out / f'{model}_seed{seed}' for seed in range(1, s.seeds + 1)] for name, model in NAMES.items()}
        train_all({run: [*arguments(s), f'--model={NAMES[name]}', f'--seed={seed}',
                         *(['--scan=loop'] if '.' in NAMES[name] else [])]  # there is no fast form of an edit
                   for name, folders in runs.items() for seed, run in enumerate(folders, 1)}, s.jobs)
        rows = table(runs)
        write_csv(out / 'gpn_ablations.csv', rows)
        write_file(out / 'gpn_ablations.md', markdown(rows).encode())
        print(markdown(rows) + f'written to {out}/gpn_ablations.md and .csv')


if __name__ == '__main__':
    main()
