"""Gradient of later losses at a position (SPS paper, figure 5a and eq. 6).

    python -m papers.sps.gradient_flow RUN RUN ... --out=NAME

The loss at step i + k depends on position p of step i only through what later positions read of it.
Relative to the gradient that p receives from the loss of its own step,

    r(p, k) = ||gradient of the loss at i + k|| / ||gradient of the loss at i||,

both with respect to p's own copy of the parameters: the blocks and its input embedding, without
head and final norm. Two-stream models have two positions per step, x_i and rho_i, each with a copy.
r is averaged over 8 steps of each of 1,000 random validation documents, read from their start.

Writes NAME.png (r over k, raw and smoothed) and NAME.csv. No copies are made: for a linear layer
with input a and output gradient g at a position, the gradient of that position's weights is g a^T,
with norm ||g|| ||a||. 1,000 documents take about 850,000 passes over 540 tokens on average.
"""
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf, log10

import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F

from analysis import figures
from analysis.runs import finished, labeled
from lm_architectures.files import UserError
from lm_architectures.machine.devices import DType
from lm_architectures.machine.terminal import make_progress
from papers import models

STREAMS = 'x', 'rho'
TREND = 21  # smoothing window in offsets (the paper's script)
SEED = 0  # for documents and positions


@dataclass
class Settings(models.ModelSettings):
    n_documents: int = 1000  # number of validation documents
    positions: int = 8  # random steps i >= block_size / 16 per document
    block_size: int = 1024  # tokens read of each document, at most the runs' training windows
    max_k: int | None = None  # largest k; None: half of block_size
    batch_size: int = 8  # losses per backward pass
    dtype: DType = 'float32'  # matmul dtype: float32, bfloat16, or auto (bfloat16 on a GPU, many times faster)


# ---- the gradient of a position's own parameters ----

def linear_square(layer, a, g):
    """Return ||gradient||^2 (...) of a linear layer: inputs a (..., n_in), output gradients g."""
    return (a.square().sum(-1) + (layer.bias is not None)) * g.square().sum(-1)


def norm_square(norm, a, g):
    """Return ||gradient||^2 of an RMSNorm: a, g (B, S, P, ..., C) -> (B, S, P)."""
    g = g * F.rms_norm(a, norm.normalized_shape, eps=norm.eps)
    return g.unsqueeze(-2).flatten(3, -2).sum(3).square().sum(-1)  # heads share the weights


SQUARES = {nn.Linear: linear_square, nn.RMSNorm: norm_square}


def layers_of(model) -> dict:
    """Return {layer: function from SQUARES} for the layers of the blocks.

    Raises UserError for a model without blocks, with other layer types, or with repeated blocks.
    """
    layers = {layer: SQUARES.get(type(layer)) for layer in getattr(model, 'blocks', nn.ModuleList()).modules()
              if [*layer.parameters(recurse=False)]}
    if not layers or None in layers.values() or hasattr(model, 'all_unrolls') and model.config.K > 1:
        name = type(model).__module__.rpartition('.')[2]
        raise UserError(f'{name} cannot be analyzed: expected a run of standard, sps or nextlat, '
                        'whose blocks have only linear layers and RMSNorm')
    return layers


@contextmanager
def recorded_uses(model, layers, T, positions):
    """Context manager: yield {layer: (input, output gradient)}, filled by forward and backward.

    Both are (B, S, P, ...), with S = 2 where both streams of model_sps are active, else 1. The
    keys 'x' (token embedding) and 'rho' (<predict> embedding) have input None.
    """
    uses = {}

    def at_positions(x):
        x = x.detach().unflatten(1, (-1, T))  # two streams are concatenated along time
        return x.index_select(2, positions).to(torch.promote_types(x.dtype, torch.float32))

    def watch(y, key, a=None):
        y.register_hook(lambda g: uses.update({key: (a, at_positions(g))}))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(
                lambda layer, args, y: watch(y, layer, at_positions(args[0]))))
        hooks.enter_context(model.embed.register_forward_hook(  # not for the one id of <predict>
            lambda _, args, y: watch(y.requires_grad_(), 'x') if args[0].numel() > 1 else None))
        if hasattr(model, 'n_x_layers'):  # model_sps
            first = model.blocks[model.n_x_layers]
            hooks.enter_context(first.register_forward_pre_hook(lambda _, args: watch(args[0], 'rho')))
        yield uses


def squared_norms(model, layers, uses):
    """Return ||gradient||^2 (B, S, P) of each position's copy of the parameters.

    The token embedding counts for x, even where rho reads it; <predict> counts for rho.
    """
    total = uses['x'][1].square().sum(-1)
    if 'rho' in uses:
        total = torch.cat([total, uses['rho'][1][:, 1:].square().sum(-1)], 1)
    for layer, square in layers.items():
        part = square(layer, *uses[layer])
        # layers with one stream: x below rho's first layer, the output stream in the last layer
        ends_in_rho = total.shape[1] == 2 and model.output == (1,)
        first = total.shape[1] - part.shape[1] if ends_in_rho and layer in {*model.blocks[-1].modules()} else 0
        total[:, first:first + part.shape[1]] += part
    return total


def gradient_norms(model, ids, positions, steps):
    """Return gradient norms (J, S, P) of the losses at ascending `steps` (J,) at `positions` (P,).

    ids (n,) int64: a document. Each loss has a row of the batch, so one backward pass computes all.
    """
    layers = layers_of(model)
    weight = model.head.weight if model.config.pad_rows_in_loss else model.head.weight[:model.config.n_ids]
    idx = ids[:steps[-1] + 1].expand(len(steps), -1)
    with recorded_uses(model, layers, idx.shape[1], positions) as uses:
        logits = model.final_hidden(idx)[torch.arange(len(steps), device=ids.device), steps] @ weight.T
        F.cross_entropy(logits.to(weight.dtype), ids[steps + 1], reduction='sum').backward()
    return squared_norms(model, layers, uses).sqrt()


def ratios(model, ids, positions, max_k, batch_size):
    """Return r(p, k), k = 0 to max_k, (P, S, max_k + 1), of ids (n,) and ascending positions (P,).

    inf or nan where the loss does not depend on p at its own step, such as rho of Reverse SPS.
    """
    steps = torch.unique(positions[:, None] + torch.arange(max_k + 1, device=ids.device))
    norms = torch.zeros(len(positions), 1 + hasattr(model, 'n_x_layers'), max_k + 1, dtype=torch.float64)
    for part in steps.split(batch_size):
        reached = positions[positions <= part[-1]]
        found = gradient_norms(model, ids, reached, part)  # (J, S, P)
        k = part[:, None] - reached
        row, column = ((k >= 0) & (k <= max_k)).nonzero(as_tuple=True)
        norms[column.cpu(), :, k[row, column].cpu()] = found[row, :, column].cpu().double()
    return norms / norms[:, :, :1]


# ---- over documents and runs ----

def shortest_document(s: Settings) -> int:
    """Return the minimum document length, including eos: 585 with the paper's settings."""
    return s.block_size // 16 + s.positions + s.max_k + 1


def draw_positions(n_tokens: int, s: Settings, rng: random.Random) -> list[int]:
    """Draw ascending steps of a document of n_tokens, each followed by at least max_k losses."""
    return sorted(rng.sample(range(s.block_size // 16, n_tokens - s.max_k - 1), s.positions))


def mean_ratios(model, documents, s: Settings):
    """Return r(p, k) averaged over documents (ids (n,)) and positions: (S, max_k + 1) float64."""
    device, rng, progress, total = model.embed.weight.device, random.Random(SEED), make_progress(), 0
    model.requires_grad_(False)
    for done, document in enumerate(documents, 1):
        positions = torch.tensor(draw_positions(len(document), s, rng), device=device)
        with models.autocast(s.dtype, device):
            each = ratios(model, torch.as_tensor(document, device=device), positions, s.max_k, s.batch_size)
        total = total + each.mean(0)
        progress(f'{done} of {len(documents)} documents')
    return total / len(documents)


def measure(folder: str, s: Settings) -> list[dict]:
    """Return a run's mean r(p, k) for each stream and k >= 1."""
    model, data, _ = models.load(folder, s)
    documents, rows = models.long_documents(data, shortest_document(s), s.block_size + 1, s.n_documents, SEED), []
    for stream, mean in zip(STREAMS, mean_ratios(model, documents, s)[:, 1:].tolist()):
        if mean[0] < inf:
            rows += [{'stream': stream, 'k': k, 'ratio': ratio, 'documents': len(documents)}
                     for k, ratio in enumerate(mean, 1)]
        else:
            print(f'{folder}: the loss of a step does not depend on its own {stream}, so there is no ratio for it')
    return rows


def log_trend(ratios) -> list:
    """Smooth the logarithms up to the first ratio of 0 (no path that far back); then None."""
    ratios = [*ratios]
    end = next((i for i, ratio in enumerate(ratios) if not ratio > 0), len(ratios))
    trend = models.smoothed([log10(ratio) for ratio in ratios[:end]], TREND) if end else []
    return [10 ** y for y in trend] + [None] * (len(ratios) - end)


def plot(rows: pd.DataFrame):
    style_of = {f'{label}, {stream}': style | {'linestyle': line}
                for label, style in figures.styles(rows.label).items() for stream, line in zip(STREAMS, ('-', ':'))}
    shown = rows.assign(label=rows.label + ', ' + rows.stream).dropna(subset='smoothed')
    return models.line_figure(
        'Gradient of later losses at a position', shown, 'k',
        {'ratio': dict(marker=None, linewidth=1.5),
         'smoothed': dict(marker=None, alpha=0.4, linewidth=0.8, label=None)},
        'Faint: smoothed\nx: input stream\nrho: prediction stream', style_of, yscale='log',
        xlabel='distance k from the position to the loss, tokens', ylabel='gradient norm / gradient norm at k = 0')[0]


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    runs = finished(labeled(runs, s.labels))
    block = min(s.block_size, runs.block_size.min())
    s = replace(s, block_size=block, max_k=s.max_k or block // 2)
    print(f'the first {block} tokens of each document, k up to {s.max_k}, positions from {block // 16} on')
    if block < shortest_document(s) - 1:
        raise UserError(f'block_size is {block}, too short for {s.positions} positions from {block // 16} on and '
                        f'max_k = {s.max_k} after them. Lower max_k or positions')
    rows = models.measured(runs, measure, s)
    rows = rows.groupby(['label', 'stream', 'k'], sort=False).agg(
        ratio=('ratio', 'mean'), runs=('run', 'size'), documents=('documents', 'first')).reset_index()
    rows['smoothed'] = rows.groupby(['label', 'stream']).ratio.transform(log_trend)
    rows = rows.assign(seed=SEED, positions=s.positions, block_size=block, max_k=s.max_k, dtype=s.dtype, data=s.data)
    figures.show(rows[rows.k.isin((1, 4, 16, 64, 256, s.max_k))], 'label', 'stream', 'k', 'ratio')
    return {'.csv': rows, '.png': plot(rows)}


if __name__ == '__main__':
    main()
