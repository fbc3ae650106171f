"""Where the gradient of later losses lands (SPS paper, figure 5a and eq. 6).

    python -m analysis.gradient_flow RUN RUN ... --out=NAME

The loss at step i + k reaches position p of step i only through what later positions read of it. In units of the
gradient that p gets from its own step's loss,

    r(p, k) = ||gradient of the loss at i + k|| / ||gradient of the loss at i||,

both with respect to p's own copy of the parameters: those of the blocks, and its input embedding, without the head and
the final norm. Two streams have two positions at a step, x_i and rho_i, and a copy for each. r is averaged over 8 steps
of each of 1,000 validation documents, drawn at random and read from their start.

Writes NAME.png (the ratio over k, raw and smoothed) and NAME.csv. No copies are made: where a linear layer has input
a at a position and gradient g at its output, the gradient of that position's weights is g a^T, whose norm is
||g|| ||a||. The losses of 1,000 documents are some 850,000 forwards and backwards over 540 tokens on average.
"""
import random
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf, log10

import torch
import torch.nn as nn
import torch.nn.functional as F

from analysis import figures
from common.files import UserError
from common.machine import make_progress

STREAMS = 'x', 'rho'
TREND = 21  # offsets that the smoothed line is fitted over (the paper's script)
IN_CSV = 'positions', 'block_size', 'max_k', 'dtype', 'data', 'seed'  # settings beside each ratio


@dataclass
class Settings:
    out: str | None = None  # NAME of the files to write, without ending; None: gradient_flow beside the runs
    data: str | None = None  # data folder; None: the runs' own
    n_documents: int = 1000  # validation documents that are long enough
    seed: int = 0  # of the documents and positions that are drawn
    positions: int = 8  # steps i of each document, drawn at random, from block_size / 16 on
    block_size: int = 1024  # tokens that are read of a document; of runs with shorter windows, theirs
    max_k: int | None = None  # largest k; None: half of block_size
    batch_size: int = 8  # losses of one backward
    dtype: str = 'float32'  # of products: float32, bfloat16, or auto (bfloat16 on a GPU, many times faster)
    device: str = 'auto'  # auto, cuda, cpu or mps


# ---- the gradient of a position's own parameters ----

def linear_square(layer, a, g):
    """Return ||gradient||^2 (...) of a linear layer's weight and bias: inputs a (..., n_in), output gradients g."""
    return (a.square().sum(-1) + (layer.bias is not None)) * g.square().sum(-1)


def norm_square(norm, a, g):
    """Return the same for an RMSNorm: inputs and output gradients (B, S, P, ..., C) -> (B, S, P).

    The axes between are heads, which share a position's copy of the weights.
    """
    g = g * F.rms_norm(a, norm.normalized_shape, eps=norm.eps)
    return g.unsqueeze(-2).flatten(3, -2).sum(3).square().sum(-1)


SQUARES = {nn.Linear: linear_square, nn.RMSNorm: norm_square}


def layers_of(model, run) -> dict:
    """Return {layer: its function of SQUARES} for the layers of the blocks.

    Raises UserError for a model without blocks, with a layer of another kind, or that runs its blocks several times.
    """
    layers = {layer: SQUARES.get(type(layer)) for layer in getattr(model, 'blocks', nn.ModuleList()).modules()
              if [*layer.parameters(recurse=False)]}
    if not layers or None in layers.values() or getattr(model.config, 'K', 1) > 1:
        raise UserError(f'{run} is a {type(model).__module__}: expected a run of standard, sps or nextlat, with linear '
                        'layers and RMSNorm only')
    return layers


@contextmanager
def recorded_uses(model, layers, T, positions):
    """Context manager: yields {layer: (input, output gradient)}, filled by a forward of T positions and its backward.

    Both are (B, S, P, ...): S is 2 for model_sps where both streams are active, else 1. The token embedding is under
    'x', that of <predict> under 'rho'; they have no input.
    """
    uses = {}

    def at_positions(x):
        x = x.detach().unflatten(1, (-1, T))  # two streams follow each other
        return x.index_select(2, positions).to(torch.promote_types(x.dtype, torch.float32))

    def watch(y, key, a=None):
        y.register_hook(lambda g: uses.update({key: (a, at_positions(g))}))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(
                lambda layer, args, y: watch(y, layer, at_positions(args[0]))))
        hooks.enter_context(model.embed.register_forward_hook(lambda _, args, y: watch(y.requires_grad_(), 'x')))
        if hasattr(model, 'n_x_layers'):  # model_sps
            first = model.blocks[model.n_x_layers]
            hooks.enter_context(first.register_forward_pre_hook(lambda _, args: watch(args[0], 'rho')))
        yield uses


def squared_norms(model, layers, uses):
    """Return ||gradient||^2 with respect to the copies of the parameters, (B, S, P), from `recorded_uses`.

    A token's embedding belongs to x, even where rho reads it; <predict> belongs to rho.
    """
    total = uses['x'][1].square().sum(-1)
    if 'rho' in uses:
        total = torch.cat([total, uses['rho'][1][:, 1:].square().sum(-1)], 1)
    for layer, square in layers.items():
        part = square(layer, *uses[layer])
        # One stream of two: x below rho's first layer, and in the last layer the output stream.
        ends_in_rho = total.shape[1] == 2 and model.output == (1,)
        first = total.shape[1] - part.shape[1] if ends_in_rho and layer in {*model.blocks[-1].modules()} else 0
        total[:, first:first + part.shape[1]] += part
    return total


def gradient_norms(model, ids, positions, steps, run='the model'):
    """Return norms (J, S, P) of the gradients of the losses at ascending `steps` (J,) with respect to the copies at
    `positions` (P,).

    ids (n,) int64: a document. Every loss has a row of the batch, so one backward computes them all.
    """
    layers = layers_of(model, run)
    weight = model.head.weight if model.config.pad_rows_in_loss else model.head.weight[:model.config.n_ids]
    idx = ids[:steps[-1] + 1].expand(len(steps), -1)
    with recorded_uses(model, layers, idx.shape[1], positions) as uses:
        logits = model.final_hidden(idx)[torch.arange(len(steps), device=ids.device), steps] @ weight.T
        F.cross_entropy(logits.to(weight.dtype), ids[steps + 1], reduction='sum').backward()
    return squared_norms(model, layers, uses).sqrt()


def ratios(model, ids, positions, max_k, batch_size, run='the model'):
    """Return r(p, k) of one document. ids (n,), positions (P,) ascending -> (P, S, max_k + 1) float64, k from 0.

    inf or nan where the loss at p's own step does not reach p, such as rho of Reverse SPS.
    """
    steps = torch.unique(positions[:, None] + torch.arange(max_k + 1, device=ids.device))
    norms = None
    for part in steps.split(batch_size):
        reached = positions[positions <= part[-1]]
        found = gradient_norms(model, ids, reached, part, run)  # (J, S, P)
        if norms is None:
            norms = torch.zeros(len(positions), found.shape[1], max_k + 1, dtype=torch.float64)
        k = part[:, None] - reached
        row, column = ((k >= 0) & (k <= max_k)).nonzero(as_tuple=True)
        norms[column.cpu(), :, k[row, column].cpu()] = found[row, :, column].cpu().double()
    return norms / norms[:, :, :1]


# ---- over documents and runs ----

def fitted(s: Settings, runs: list[str]) -> Settings:
    """Return the settings with their lengths filled in, shorter for runs of short windows."""
    block = figures.fitting_block(runs, s.block_size)
    filled = replace(s, block_size=block, max_k=s.max_k or block // 2)
    print(f'k goes to {filled.max_k}, positions from {block // 16}')
    if block < shortest_document(filled) - 1:
        raise UserError(f'block_size is {block}: expected room for {s.positions} positions from '
                        f'{block // 16} on and max_k = {filled.max_k} after them. Lower max_k or positions')
    return filled


def shortest_document(s: Settings) -> int:
    """Return the least tokens of a document, eos counted, with enough positions: 585 with the paper's settings."""
    return s.block_size // 16 + s.positions + s.max_k + 1


def draw_positions(n_tokens: int, s: Settings, rng: random.Random) -> list[int]:
    """Return ascending steps of a document of n_tokens tokens whose losses up to max_k later are all in it."""
    return sorted(rng.sample(range(s.block_size // 16, n_tokens - s.max_k - 1), s.positions))


def mean_ratios(model, documents, s: Settings, show=lambda line: None, run='the model'):
    """Return the mean of r(p, k) over documents (ids, (n,) each) and positions: (S, max_k + 1) float64."""
    device, rng, total = model.embed.weight.device, random.Random(s.seed), 0
    model.requires_grad_(False)
    for done, document in enumerate(documents, 1):
        positions = torch.tensor(draw_positions(len(document), s, rng), device=device)
        with figures.autocast(s.dtype, device):
            each = ratios(model, torch.as_tensor(document, device=device), positions, s.max_k, s.batch_size, run)
        total = total + each.mean(0)
        show(f'{run}: {done} of {len(documents)} documents')
    return total / len(documents)


def measure(run: str, s: Settings):
    """Return (mean r(p, k) (S, max_k + 1), number of documents) of a run."""
    model, _, data = figures.load_model_and_data(run, s)
    documents = figures.long_documents(data, shortest_document(s), s.block_size + 1, s.n_documents, s.seed)
    return mean_ratios(model, documents, s, make_progress(), run), len(documents)


def table(label: str, measured: list[tuple], s: Settings) -> list[dict]:
    """Return rows of the CSV: means over what `measure` returned for each of a label's runs, and the settings."""
    means = sum(mean for mean, _ in measured) / len(measured)
    used = {name: asdict(s)[name] for name in IN_CSV}
    rows = []
    for stream, mean in zip(STREAMS, means[:, 1:].tolist()):
        if not mean[0] < inf:
            print(f'{label}: the loss of a step does not reach its own {stream}, so there is no ratio for it')
            continue
        trend = log_trend(mean)
        rows += [{'label': label, 'stream': stream, 'k': k, 'ratio': ratio, 'smoothed': trend[k - 1],
                  'runs': len(measured), 'documents': measured[0][1], **used} for k, ratio in enumerate(mean, 1)]
    return rows


def log_trend(ratios: list[float]) -> list:
    """Return the trend of the logarithms up to where a ratio is 0 (no path leads so far back); '' from there on."""
    end = next((i for i, ratio in enumerate(ratios) if not ratio > 0), len(ratios))
    trend = figures.smoothed([log10(ratio) for ratio in ratios[:end]], TREND) if end else []
    return [10 ** y for y in trend] + [''] * (len(ratios) - end)


def plot(rows: list[dict]):
    figure, axes = figures.new_figure(figsize=(7, 4.5))
    for label, own, style in figures.styled(figures.by_label(rows)):
        for stream, line in zip(STREAMS, ('-', ':')):
            points = [row for row in own if row['stream'] == stream and row['smoothed'] != '']
            if points:
                k, style = [row['k'] for row in points], style | {'linestyle': line}
                axes.plot(k, [row['ratio'] for row in points], alpha=0.3, linewidth=0.8, **style)
                axes.plot(k, [row['smoothed'] for row in points], linewidth=2, label=f'{label}, {stream}', **style)
    axes.set(xlabel='k, steps from a position to the loss', yscale='log',
             ylabel="gradient, relative to that of the position's own loss")
    figures.number_log_axis(axes.yaxis, *axes.get_ylim())
    figure.legend(loc='outside right upper')
    return figure


def main(argv=None):
    with figures.runs_to_read('gradient_flow RUN RUN ... --out=NAME', Settings, argv) as (s, runs):
        s = fitted(s, runs)
        measured = figures.curves_of(runs, lambda folders: [measure(run, s) for run in figures.ended(folders)])
        rows = [row for label, of_label in measured.items() for row in table(label, of_label, s)]
        shown = [k for k in (1, 4, 16, 64, 256) if k < s.max_k] + [s.max_k]
        for label, stream in dict.fromkeys((row['label'], row['stream']) for row in rows):
            line = [row['ratio'] for row in rows if (row['label'], row['stream']) == (label, stream)]
            print(f'{label}, {stream}: ' + ', '.join(f'k = {k} {line[k - 1]:.3g}' for k in shown))
        figures.write_figure(s.out, runs, 'gradient_flow', rows, plot(rows))


if __name__ == '__main__':
    main()
