"""Perplexity by unrolls, contraction and costs of Context-Ready runs (tables 6, A7 and A8).

    python -m papers.context_ready.unrolls RUN RUN ... --out=NAME

Measures on validation data: perplexity after K = 1, 2, 3, 5, 10 parallel unrolls and sequentially;
the gain from the correction, K = 1 minus K = 5 ("Corr." in table 6); the contraction L at the K of
training, at least 3 (5 for bptt runs); the unrolls of a parallel prefill; C/N, width per layer
(table 1); multiply-adds and cache bytes per token. Writes NAME.csv and NAME.png (perplexity over
K).

The paper's L is the largest ||c_K,t - c_K-1,t|| / ||c_K-1,t - c_K-2,t|| over positions t. It does
not say how windows are combined, so three estimates are given, over positions that still change:

    L_pooled         norms pooled over all windows at each position; maximum over positions
    L_token          maximum ratio over all positions of all windows
    L_token_50 ...   50th, 90th and 99th percentiles of these ratios
"""
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from analysis import figures
from analysis.runs import named
from lm_architectures.score.scoring import perplexity
from papers import models

DEPTHS = (1, 2, 3, 5, 10)
ESTIMATES = ('L_pooled', 'L_token', 'L_token_50', 'L_token_90', 'L_token_99')


@dataclass
class Settings(models.ModelSettings):
    tokens: int = 65536  # validation tokens, from the start of the data
    batch_size: int = 16  # windows evaluated at a time


@torch.no_grad()
def unrolled(model, idx, targets):
    """Return ({K or 'sequential': nats per token}, moves, unrolls of a prefill) of a batch (B, T).

    moves (3, B, T): norms of c_K - c_(K-1), c_(K-1) - c_(K-2) and c_(K-1).
    """
    c, nll, corrections = model.config, {}, []
    if c.K == 1:
        nll = {1: model(idx, targets)['nll'].item()}
        return nll | {'sequential': nll[1]}, torch.zeros(3, *idx.shape), 1
    K = 5 if c.bptt else max(c.K, 3)
    e, _, starts, *_ = model.prepare(idx)
    for k, z in enumerate(model.all_unrolls(idx, max(K, DEPTHS[-1])), 1):
        if k in DEPTHS:
            nll[k] = model.nll(z, targets).item()
        if K - 2 <= k <= K:
            corrections.append(model.correction(z.roll(1, 1), e, starts))  # z_{t-1}; t = 0 starts a document
    first, second, last = corrections
    moves = torch.stack([x.norm(dim=-1) for x in (last - second, second - first, second)]).cpu()
    nll['sequential'] = model.nll(model.stream(idx), targets).item()
    _, n_unrolls = model.fixed_point(idx.new_full((len(idx),), idx.shape[1]), *model.prepare(idx))
    return nll, moves, n_unrolls


def contraction(moves):
    """Return the ESTIMATES of L from moves (3, B, T), '' if no correction changes."""
    def ratios(after, before, size):
        return (after / before)[before > 1e-4 * size].numpy()  # smaller changes are rounding
    pooled, tokens = ratios(*moves.norm(dim=1)), ratios(*moves)
    if not (len(pooled) and len(tokens)):
        return dict.fromkeys(ESTIMATES, '')
    values = [pooled.max(), tokens.max(), *np.quantile(tokens, (0.5, 0.9, 0.99))]
    return {name: round(float(value), 3) for name, value in zip(ESTIMATES, values)}


def measure(folder: str, s: Settings) -> list[dict]:
    """Return the row of a run in the table."""
    model, data, record = models.load(folder, s, 'prepare', 'all_unrolls', 'stream', 'nll')
    c, T, counts, found = model.config, record['settings']['block_size'], [], []
    for idx, targets in models.val_windows(data, T, s.tokens, s.batch_size, model.head.weight.device):
        if c.eos_id is not None:
            targets = targets.masked_fill(idx == c.eos_id, -1)
        counts.append(int((targets >= 0).sum()))
        found.append(unrolled(model, idx, targets))
    nats, moves, n_unrolls = zip(*found)
    perplexities = {k: round(perplexity(np.average([nll[k] for nll in nats], weights=counts)), 3) for k in nats[0]}
    return [{
        'variant': 'roformer' if c.K == 1 and c.variant != 'extra_ffn' else c.variant, 'D': c.n_layer, 'C': c.n_embd,
        'C/N': round(c.n_embd / c.n_layer), 'T': T, 'K': 'bptt' if c.bptt else c.K, 'k_min': c.k_min or '',
        **{f'K={k}': perplexities.get(k, '') for k in DEPTHS}, 'sequential': perplexities['sequential'],
        'K=1 - K=5': round(perplexities[1] - perplexities[5], 3) if c.K > 1 else '',
        **contraction(torch.cat(moves, 1)), 'prefill_unrolls': max(n_unrolls), **costs(model)}]


def costs(model):
    """Return multiply-adds per decoded token, without attention, and cache bytes per token."""
    c = model.config
    used = [p for part in ('blocks', 'correction', 'extra') if hasattr(model, part)
            for p in getattr(model, part).parameters() if p.dim() >= 2]  # variant tied uses its shared weights twice
    return {'multiply_adds_per_token': sum(p.numel() for p in used) + c.n_ids * c.n_embd,
            'cache_bytes_per_token': 2 * c.n_layer * c.n_kv_head * c.head_size * model.embed.weight.itemsize}


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    rows = models.measured(named(runs, s.labels), measure, s)
    found = rows.drop(columns='label')
    figures.show(found)
    points = rows.rename(columns={f'K={k}': k for k in DEPTHS}).melt('label', DEPTHS, 'K').replace('', np.nan)
    figure, axes = models.line_figure(
        'Context-Ready: perplexity by parallel unrolls', points, 'K', {'value': {'markersize': 5}},
        'Line: K unrolls\nDotted: sequential', xlabel='parallel unrolls K', ylabel='validation perplexity',
        xscale='log', yscale='log', xticks=DEPTHS, xticklabels=DEPTHS)
    axes.xaxis.minorticks_off()
    for row, style in zip(rows.itertuples(), figures.styles(rows.label).values()):
        axes.axhline(row.sequential, color=style['color'], linestyle=':', linewidth=1)
    return {'.csv': found, '.png': figure}


if __name__ == '__main__':
    main()
