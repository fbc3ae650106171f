"""Loss from restricting the persistent state to recent tokens (SPS paper, section 5 and figure 5b).

    python -m papers.sps.restricted_state RUN RUN ... --out=NAME

M_omega is the trained model M, without retraining, whose persistent state is restricted to the last
omega = 64 positions: the persistent stream of the SPS family (both streams of 2x Memory), all keys
and values of other models. At each position i of a document this measures

    extra nll at i = nll of M_omega at i - nll of M at i,

averaged over 8,000 validation documents of at least 2,049 tokens, read from their start. The first
omega + 1 positions are omitted because nothing changes there. Writes NAME.png (raw and smoothed)
and NAME.csv; prints means, and ratios of the first run's extra nll to that of the other runs.
"""
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from analysis import figures
from analysis.runs import finished, labeled
from lm_architectures.files import UserError
from lm_architectures.machine.devices import DType
from lm_architectures.machine.terminal import make_progress
from lm_architectures.score.scoring import target_log_probs
from lm_architectures.settings import check_ranges
from papers import models

TREND = 201  # smoothing window in positions (the paper's script)


@dataclass
class Settings(models.ModelSettings):
    omega: int = 64  # past positions of the persistent state that M_omega sees
    n_documents: int = 8000  # number of validation documents: the first that are long enough
    block_size: int = 2048  # tokens read per document, capped at the runs' training window
    batch_size: int = 4  # documents evaluated at a time
    dtype: DType = 'float32'  # matmul dtype: float32, bfloat16, or auto (bfloat16 on a GPU, many times faster)

    def __post_init__(self):
        check_ranges(self, omega=0, n_documents=1, block_size=1, batch_size=1)


def restricted(model, omega: int):
    """Return M_omega: a model with the same weights and a persistent window of omega.

    Raises UserError if the model has no such window, or a window of omega or less.
    """
    config = model.config
    name = getattr(config, 'state_window', None)
    if name is None:
        raise UserError(f'{type(model).__module__.rpartition(".")[2]} has a state without a window '
                        '(Config.state_window): expected a run of sps, standard or context_ready')
    trained = getattr(config, name)
    if trained is not None and trained <= omega:
        raise UserError(f'the model was trained with {name} = {trained}, so omega = {omega} changes nothing: give a '
                        'smaller omega')
    narrow = type(model)(replace(config, **{name: omega}))
    narrow.load_state_dict(model.state_dict())
    weight = model.embed.weight
    return narrow.to(weight.device, weight.dtype).eval()


@torch.no_grad()
def nll_by_position(model, windows, s: Settings):
    """Return the nats at each position summed over windows (N, T + 1): (T,) float64, on the CPU."""
    windows = torch.as_tensor(windows, device=model.embed.weight.device)
    with models.autocast(s.dtype, windows.device):
        log_probabilities, _ = target_log_probs(model.logits(windows[:, :-1]), windows[:, 1:])
    return -log_probabilities.sum(0).cpu().double()


def measure(folder: str, s: Settings) -> dict:
    """Return columns by position: the nll of M and of M_omega, averaged over documents."""
    model, data, _ = models.load(folder, s)
    narrow = restricted(model, s.omega)
    documents = np.stack(models.long_documents(data, s.block_size + 1, s.block_size + 1, s.n_documents))
    progress, total = make_progress(), torch.zeros(2, s.block_size, dtype=torch.float64)
    for start in range(0, len(documents), s.batch_size):
        windows = documents[start:start + s.batch_size]
        total += torch.stack([nll_by_position(m, windows, s) for m in (model, narrow)])
        progress(f'{folder}: {start + len(windows)} of {len(documents)} documents')
    nll, cut = (total / len(documents)).numpy()
    return {'position': range(1, len(nll) + 1), 'nll': nll, 'restricted_nll': cut, 'documents': len(documents)}


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    runs = finished(labeled(runs, s.labels))
    block = min(s.block_size, runs.block_size.min())
    print(f'the first {block} tokens of each document')
    if block < s.omega + 2:
        raise UserError(f'omega is {s.omega}: expected at most {block - 2} for documents of {block} tokens')
    s = replace(s, block_size=block)
    rows = models.measured(runs, measure, s)
    rows = rows[rows.position > s.omega + 1].groupby(['label', 'position'], sort=False).agg(
        nll=('nll', 'mean'), restricted_nll=('restricted_nll', 'mean'), runs=('run', 'size'),
        documents=('documents', 'first')).reset_index()
    rows['extra_nll'] = rows.restricted_nll - rows.nll
    rows['smoothed'] = rows.groupby('label').extra_nll.transform(models.smoothed, TREND)
    rows = rows.assign(omega=s.omega, block_size=block, dtype=s.dtype, data=s.data)
    summary = rows.groupby('label', sort=False).agg(**{
        'extra nll, mean': ('extra_nll', 'mean'), 'last': ('smoothed', 'last'), 'documents': ('documents', 'first')})
    for name in ('extra nll, mean', 'last'):
        summary[f'first / {name}'] = (summary[name].iloc[0] / summary[name]).where(summary[name] != 0)
    figures.show(summary.reset_index())
    figure, _ = models.line_figure(
        f'Loss with only the last {s.omega} positions of the persistent state', rows, 'position',
        {'extra_nll': dict(marker=None, alpha=0.3, linewidth=0.8, label=None),
         'smoothed': dict(marker=None, linewidth=2)}, 'Thin: each position\nThick: smoothed',
        xlabel='position in the document, tokens', xlim=(0, None), ylabel='extra loss, nats per token')
    return {'.csv': rows, '.png': figure}


if __name__ == '__main__':
    main()
