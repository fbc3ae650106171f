"""Linear probes: what a frozen state knows of the tokens to come (NextLat paper, the TinyStories figures).

    python -m analysis.probes RUN RUN ... --out=NAME

For each offset k = 1 ... 20 a linear layer learns to predict x_{t+k} from a frozen model's state after x_t, on the
run's training data, with its batch and weight decay, and with its learning rate unless --learning_rate gives one for
all. The state is `trunk(idx)` if the model has it (MTP before its last blocks, BST's forward
encoder), else `final_hidden`. Offsets that leave the document do not count. Writes the validation nats of each offset
to NAME.csv, and to NAME.png their difference to those of the first run's configuration: give next-token runs first.
"""
from dataclasses import dataclass, replace
from math import inf

import torch
import torch.nn.functional as F

from analysis import figures
from common.files import UserError
from common.machine import make_progress
from data.shards import Data
from train import make_optimizer


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: probes beside the runs
    data: str | None = None  # data folder; None: the runs' own
    offsets: int = 20  # probes predict 1 to so many tokens ahead
    steps: int = 20_000  # training steps of the probes
    learning_rate: float | None = None  # of the probes; None: the run's
    eval_tokens: int = 1_000_000  # validation tokens that they are judged on, or all if there are fewer
    dtype: str = 'float32'  # of products: float32, bfloat16, or auto (bfloat16 on a GPU, many times faster)
    device: str = 'auto'  # auto, cuda, cpu or mps


def offset_targets(tokens: torch.Tensor, offset: int, eos_id: int) -> torch.Tensor:
    """Return x_{t+offset} at each t: tokens (B, T + 1) -> (B, T) int64; -1 past the window or the document."""
    B, T = tokens.shape[0], tokens.shape[1] - 1
    targets = torch.full((B, T), -1, dtype=torch.int64, device=tokens.device)
    ends = F.pad((tokens == eos_id).cumsum(1), (1, 0))  # of documents, before each token
    within = ends[:, offset:-1] == ends[:, :T - offset + 1]  # none among x_t ... x_{t+offset-1}
    targets[:, :T - offset + 1] = tokens[:, offset:].masked_fill(~within, -1)
    return targets


@torch.no_grad()
def states(model, idx: torch.Tensor, s: Settings) -> torch.Tensor:
    """Return the states that probes read. idx (B, T) -> (B, T, C) fp32."""
    with figures.autocast(s.dtype, idx.device):
        h = model.trunk(idx) if hasattr(model, 'trunk') else model.final_hidden(idx)
    return h.float()


def nats(probe, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of a probe's negative log-likelihoods: h (B, T, C), targets (B, T); -1 is ignored."""
    return F.cross_entropy(probe(h).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')


def train_step(model, probes, optimizers, windows: torch.Tensor, eos_id: int, rows: int, s: Settings, clip: float):
    """Train every probe for a step on windows (B, T + 1), `rows` of them at a time."""
    totals = [int((offset_targets(windows, k, eos_id) >= 0).sum()) for k in range(1, s.offsets + 1)]
    for part in windows.split(rows):
        h = states(model, part[:, :-1], s)
        for k, (probe, total) in enumerate(zip(probes, totals), 1):
            (nats(probe, h, offset_targets(part, k, eos_id)) / max(1, total)).backward()
    for probe, optimizer in zip(probes, optimizers):
        torch.nn.utils.clip_grad_norm_(probe.parameters(), clip or inf)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def judged(model, probes, data: Data, train_settings, s: Settings, device) -> list[float]:
    """Return the mean validation nats of each probe."""
    T, rows = train_settings.block_size, train_settings.micro_batch_size
    n = max(1, min(s.eval_tokens // T, data.n_windows('val', T)))
    sums, counts = torch.zeros(2, len(probes), dtype=torch.float64)
    for first in range(0, n, rows):
        idx, targets = (x.to(device) for x in data.val_batch(range(first, min(n, first + rows)), T))
        windows, h = torch.cat([idx, targets[:, -1:]], 1), states(model, idx, s)
        for i, probe in enumerate(probes):
            wanted = offset_targets(windows, i + 1, data.eos_id)
            sums[i] += nats(probe, h, wanted).item()
            counts[i] += (wanted >= 0).sum().item()
    return (sums / counts).tolist()


def measure(run: str, s: Settings) -> list[float]:
    """Train probes on a run's states; return their validation nats at offsets 1, 2, ..."""
    model, _, data = figures.load_model_and_data(run, s)
    device = next(model.parameters()).device
    t = replace(figures.settings_of(run), optimizer='adamw')  # muon does not take heads
    if s.learning_rate is not None:
        t.learning_rate = s.learning_rate
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task, whose rows have no text to probe for: give --data=FOLDER')
    if s.offsets > t.block_size:
        raise UserError(f'offsets is {s.offsets}, but {run} reads windows of {t.block_size} tokens: give fewer')
    model.requires_grad_(False)
    torch.manual_seed(t.seed)
    width = states(model, torch.zeros(1, 2, dtype=torch.int64, device=device), s).shape[-1]
    probes = [torch.nn.Linear(width, data.n_ids, device=device) for _ in range(s.offsets)]
    optimizers = [make_optimizer(probe, t) for probe in probes]
    progress = make_progress()
    for step in range(s.steps):
        idx, targets = (x.to(device) for x in data.train_batch(step, t.batch_size, t.block_size, t.seed))
        train_step(model, probes, optimizers, torch.cat([idx, targets[:, -1:]], 1), data.eos_id, t.micro_batch_size, s,
                   t.grad_clip)
        progress(f'{run}: step {step + 1}/{s.steps}')
    return judged(model, probes, data, t, s, device)


def table(measured: dict[str, list[list[float]]]) -> list[dict]:
    """Return rows of the CSV of {label: [nats by offset, one list a run]}; `difference` is to the first label."""
    rows = [{'label': label, 'offset': i} | figures.spread(nats)
            for label, runs in measured.items() for i, nats in enumerate(zip(*runs), 1)]
    first = {row['offset']: row['mean'] for row in rows if row['label'] == rows[0]['label']}
    return [row | {'difference': row['mean'] - first[row['offset']]} for row in rows]


def plot(rows: list[dict]):
    figure, axes = figures.new_figure(figsize=(7, 4.5))
    for label, points, style in figures.styled(figures.by_label(rows)):
        axes.plot([row['offset'] for row in points], [row['difference'] for row in points], marker='o', markersize=3,
                  label=label, **style)
    axes.set_yscale('symlog', linthresh=0.05)  # the first tokens differ by tenths, the others by hundredths
    axes.set(xlabel='tokens ahead', ylabel=f'nats more than probes of {rows[0]["label"]}')
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('probes RUN RUN ... --out=NAME, next-token runs first', Settings, argv) as (s, runs):
        measured = figures.curves_of(runs, lambda folders: [measure(run, s) for run in figures.ended(folders)])
        rows = table(measured)
        for row in rows:
            if row['offset'] in (1, s.offsets):
                print(f'{row["label"]}, {row["offset"]} ahead: {row["mean"]:.4f} nats, {row["difference"]:+.4f}')
        figures.write_figure(s.out, runs, 'probes', rows, plot(rows))


if __name__ == '__main__':
    main()
