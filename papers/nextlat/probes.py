"""Linear probes that predict later tokens from frozen states (NextLat paper, TinyStories figures).

    python -m papers.nextlat.probes RUN RUN ... --out=NAME

For each offset k = 1 ... 20, a linear layer is trained to predict x_{t+k} from the state after x_t,
with the run's data, batch size, weight decay and learning rate (--learning_rate sets one for all).
The state is `trunk(idx)` if the model has it (MTP before its last blocks, BST's forward encoder),
else `final_hidden`. Targets beyond the end of a document are ignored. Writes validation losses to
NAME.csv, and differences to the first run's configuration to NAME.png: give next-token runs first.
"""
from dataclasses import dataclass, replace
from math import inf

import pandas as pd
import torch
import torch.nn.functional as F

from analysis import figures
from analysis.runs import averaged, finished, labeled
from lm_architectures import train
from lm_architectures.files import UserError
from lm_architectures.machine.devices import DType
from lm_architectures.machine.terminal import make_progress
from lm_architectures.settings import make_settings
from papers import models


@dataclass
class Settings(models.ModelSettings):
    offsets: int = 20  # number of probes: one for each offset from 1 to this
    steps: int = 20_000  # training steps of the probes
    learning_rate: float | None = None  # learning rate of the probes; None: the run's
    eval_tokens: int = 1_000_000  # validation tokens to evaluate the probes on, or all if there are fewer
    dtype: DType = 'float32'  # matmul dtype: float32, bfloat16, or auto (bfloat16 on a GPU, many times faster)


def offset_targets(tokens: torch.Tensor, offset: int, eos_id: int) -> torch.Tensor:
    """Return x_{t+offset} at each t, -1 past window or document: tokens (B, T + 1) -> (B, T)."""
    B, T = tokens.shape[0], tokens.shape[1] - 1
    targets = torch.full((B, T), -1, dtype=torch.int64, device=tokens.device)
    ends = F.pad((tokens == eos_id).cumsum(1), (1, 0))  # number of eos before each token
    within = ends[:, offset:-1] == ends[:, :T - offset + 1]  # no eos among x_t ... x_{t+offset-1}
    targets[:, :T - offset + 1] = tokens[:, offset:].masked_fill(~within, -1)
    return targets


@torch.no_grad()
def states(model, idx: torch.Tensor, s: Settings) -> torch.Tensor:
    """Return the frozen states that the probes read: idx (B, T) -> (B, T, C) fp32."""
    with models.autocast(s.dtype, idx.device):
        h = model.trunk(idx) if hasattr(model, 'trunk') else model.final_hidden(idx)
    return h.float()


def nats(probe, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a probe's summed nll. h (B, T, C), targets (B, T); -1 is ignored."""
    return F.cross_entropy(probe(h).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')


def train_step(model, probes, optimizer, windows: torch.Tensor, eos_id: int, rows: int, s: Settings, clip: float):
    """Train all probes for one step on windows (B, T + 1), `rows` windows at a time."""
    totals = [int((offset_targets(windows, k, eos_id) >= 0).sum()) for k in range(1, s.offsets + 1)]
    for part in windows.split(rows):
        h = states(model, part[:, :-1], s)
        for k, (probe, total) in enumerate(zip(probes, totals), 1):
            (nats(probe, h, offset_targets(part, k, eos_id)) / max(1, total)).backward()
    for probe in probes:
        torch.nn.utils.clip_grad_norm_(probe.parameters(), clip or inf)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, probes, batches, eos_id: int, s: Settings) -> list[float]:
    """Return the mean loss of each probe in nats. batches: (idx, targets), both (B, T)."""
    sums, counts = torch.zeros(2, len(probes), dtype=torch.float64)
    for idx, targets in batches:
        windows, h = torch.cat([idx, targets[:, -1:]], 1), states(model, idx, s)
        for i, probe in enumerate(probes):
            wanted = offset_targets(windows, i + 1, eos_id)
            sums[i] += nats(probe, h, wanted).item()
            counts[i] += (wanted >= 0).sum().item()
    return (sums / counts).tolist()


def measure(folder: str, s: Settings) -> dict:
    """Train probes on a run's states. Returns columns: offsets and validation losses."""
    model, data, record = models.load(folder, s)
    device = next(model.parameters()).device
    t = make_settings(train.Settings, record['settings'], f'in {folder}/config.json')
    rate = t.learning_rate if s.learning_rate is None else s.learning_rate
    t = replace(t, optimizer='adamw', learning_rate=rate)  # Muon does not train output layers
    if data.T:
        raise UserError(f'{data.folder} is a task and has no text: give --data=FOLDER')
    if s.offsets > t.block_size:
        raise UserError(f'offsets is {s.offsets}: expected at most {t.block_size}, the training window of {folder}')
    data.n_rows('val', t.block_size)  # an error if it is too short
    model.requires_grad_(False)
    torch.manual_seed(t.seed)
    width = states(model, torch.zeros(1, 2, dtype=torch.int64, device=device), s).shape[-1]
    probes = torch.nn.ModuleList(torch.nn.Linear(width, data.n_ids, device=device) for _ in range(s.offsets))
    optimizer, progress = train.make_optimizer(probes, t), make_progress()
    for step in range(s.steps):
        idx, targets = (x.to(device) for x in data.train_batch(step, t.batch_size, t.block_size, t.seed))
        train_step(model, probes, optimizer, torch.cat([idx, targets[:, -1:]], 1), data.eos_id, t.micro_batch_size, s,
                   t.grad_clip)
        progress(f'{folder}: step {step + 1}/{s.steps}')
    batches = models.val_windows(data, t.block_size, s.eval_tokens, t.micro_batch_size, device)
    return {'offset': range(1, s.offsets + 1), 'nats': evaluate(model, probes, batches, data.eos_id, s)}


def table(measured: pd.DataFrame) -> pd.DataFrame:
    """Average rows (label, offset, nats) over seeds, with differences to the first label."""
    rows = averaged(measured, ['label', 'offset'], 'nats')
    first = rows[rows.label == rows.label[0]].set_index('offset')['mean']
    return rows.assign(difference=rows['mean'] - rows.offset.map(first))


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    rows = table(models.measured(finished(labeled(runs, s.labels)), measure, s))
    figures.show(rows[rows.offset.isin((1, s.offsets))], 'label', 'offset', 'mean', 'difference')
    figure, axes = models.line_figure(
        'Linear probes of later tokens', rows, 'offset', {'difference': {'marker': 'o'}}, 'Mean over seeds',
        xlabel='offset k of the predicted token', ylabel=f'probe loss minus {rows.label[0]}, nats')
    axes.set_yscale('symlog', linthresh=0.05)  # the first tokens differ by tenths, the others by hundredths
    axes.xaxis.get_major_locator().set_params(integer=True)
    return {'.csv': rows, '.png': figure}


if __name__ == '__main__':
    main()
