"""State and memory of a trained GPN (GPN paper, section 7), and ablations beyond the paper.

    python -m papers.gpn.state RUN --out=NAME

Prints single numbers, writes all to NAME.csv (part, name, x, value) and draws curves in NAME.png:
the geometry of predicted states, the tokens that their mean decodes to, and how long the state and
memory heads remember. The ablations measure validation perplexity and state norms with the mean
direction removed from the decoded or the recurrent state, and with the slow or fast memory heads
emptied.

A head's lifetime is the lag at which the mean product of its decays falls to 1/e (the paper's
half-life). Heads are split into slow and fast at the largest gap between lifetimes. As in the
paper, states must be carried across document boundaries (--mask_documents=False).
"""
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from analysis import figures
from analysis.runs import named
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.files import UserError
from papers import models


@dataclass
class Settings(models.ModelSettings):
    batches: int = 8  # batches of validation windows, between which the mean direction is compared
    batch_size: int | None = None  # windows per batch; None: 16k states in total, as in the paper
    unigram_tokens: int = 10_000_000  # training tokens to count the unigram distribution on


@torch.no_grad()
def unroll(model, idx, without=None, carried=False, heads_off=()):
    """Run windows idx (B, T). Returns predicted states (B, T, C) and log decays (B, T, n_head).

    without (C,): direction to remove from the decoded states, and with `carried` also from the
    recurrent state; heads_off: memory heads to keep empty.
    """
    B, T = idx.shape
    u, states, decays = model.ground_input(idx), [], []
    state, index = model.first_state(B, u.device), torch.tensor(heads_off, dtype=torch.int64, device=u.device)
    with model.write.register_forward_hook(
            lambda module, inputs, write: (*write[:2], write[2].index_fill(1, index, 0), write[3])  # beta = 0
    ) if len(index) else nullcontext():
        for t in range(T):
            s, g, memory = model.step(u[:, t], *state)
            predicted = s if without is None else s - (s @ without).unsqueeze(-1) * without
            state = (predicted if carried else s), g, memory
            states.append(predicted)
            if model.config.n_head:
                decays.append(model.write.log_decay(model.write.norm(g)))
    return torch.stack(states, 1), torch.stack(decays, 1) if decays else u.new_zeros(B, T, 0)


# What is measured is a list of (part, name, value), or (part, name, {x: value}) for a curve.

def geometry(x) -> list[tuple]:
    """Return the geometry of states x (N, C), section 7.1."""
    x = x.double()
    mean, norms = x.mean(0), x.norm(dim=-1)
    deviation, covariance = x.std(0), torch.cov(x.T, correction=0)
    variance, components = torch.linalg.eigh(covariance)
    variance = variance.flip(0).clamp(min=0)
    share = variance.cumsum(0) / variance.sum()  # of the variance, by the first principal components
    first_centered, first = components[:, -1], torch.linalg.eigh(covariance + torch.outer(mean, mean))[1][:, -1]
    correlation = torch.corrcoef(x.T).nan_to_num()  # nan: a dimension that does not change
    correlation = correlation[~torch.eye(len(variance), dtype=torch.bool, device=x.device)]  # of all pairs, twice
    counts, edges = torch.histogram(correlation.cpu(), 100, range=(-1, 1))
    centers = [round(float(x), 2) for x in (edges[1:] + edges[:-1]) / 2]
    numbers = {
        'magnitude': norms.mean(),
        'magnitude deviation': norms.std(),
        'mean magnitude': mean.norm(),
        'cosine of the mean with the first component': F.cosine_similarity(mean, first, 0).abs(),
        'cosine of the mean with the first component of centered states':
            F.cosine_similarity(mean, first_centered, 0).abs(),
        'deviation min': deviation.min(),
        'deviation max': deviation.max(),
        'dead dimensions': (deviation < 1e-3 * deviation.median()).sum(),
        'correlation mean': correlation.abs().mean(),
        'correlation max': correlation.abs().max(),
        'components 90%': (share < 0.9).sum() + 1,
        'components 99%': (share < 0.99).sum() + 1,
        'stable rank': variance.sum() / variance[0],
        'participation ratio': variance.sum() ** 2 / variance.square().sum()}
    return [*(('geometry', name, value) for name, value in numbers.items()),
            ('deviation', 'sorted', dict(enumerate(deviation.sort().values))),
            ('variance', 'share', dict(enumerate(share, 1))),
            ('correlation', 'share of pairs', dict(zip(centers, counts / len(correlation))))]


def cosines(states, lags):
    """Return mean cosines (lags,) of states (B, T, C) k apart: raw, and minus the window's mean."""
    return [torch.stack([F.cosine_similarity(x[:, :-k], x[:, k:], dim=-1).mean() for k in lags])
            for x in (states, states - states.mean(1, keepdim=True))]


def retention(log_decay, lags):
    """Return the fraction of a write left after k steps, (H, lags). log_decay: (B, T, H)."""
    total = log_decay.double().cumsum(1)
    return torch.stack([(total[:, k:] - total[:, :-k]).exp().mean((0, 1)) for k in lags], 1)


def lifetime(curve, lags):
    """Return the lag at which retention falls to 1/e, interpolated exponentially, or infinity."""
    decayed = -curve.clamp(min=1e-300).log()
    return float(np.interp(1, [0, *decayed.tolist()], [0, *lags], right=inf))


def pools(lives):
    """Split heads into (fast, slow) at the largest ratio between neighboring lifetimes.

    If all lifetimes are equal, all heads are slow.
    """
    ordered = sorted(min(life, 1e6) for life in lives)
    tokens = max(zip(ordered, ordered[1:]), key=lambda pair: pair[1] / pair[0], default=ordered)[-1]
    return [h for h, life in enumerate(lives) if life < tokens], [h for h, life in enumerate(lives) if life >= tokens]


@torch.no_grad()
def evaluate(model, batches, **edits):
    """Return the nats of each target (N,) and the mean norm of the states.

    batches: [(idx, targets)], where targets of -1 are ignored; edits: arguments of `unroll`.
    """
    nats, lengths = [], []
    for idx, targets in batches:
        states = unroll(model, idx, **edits)[0]
        logits, wanted = model._logits(model.head_input(states[targets >= 0])), targets[targets >= 0]
        nats.append(F.cross_entropy(logits, wanted, reduction='none').double())
        lengths.append(states.norm(dim=-1).mean())
    return torch.cat(nats), float(torch.stack(lengths).mean())


def direction(model, means, unigram, show) -> list[tuple]:
    """Measure the mean state. means (N, C): one for each batch; others as in `measure`."""
    from scipy.stats import spearmanr
    n_ids, mean = model.config.n_ids, means.mean(0)

    def top_tokens(logits):
        return [show(i) for i in logits[:n_ids].topk(min(10, n_ids)).indices.tolist()]
    decoded = F.linear(model.norm(mean), model.decode.weight)  # without the decoder's bias, which is compared to it
    logits, embedding = model.head(decoded), model.embed.weight[:n_ids].mean(0)
    tokens, part = top_tokens(logits), 'mean direction'
    found = [(part, 'tokens', dict(enumerate(tokens)))]
    if model.config.decoder_bias:
        of_bias = top_tokens(model.head(model.decode.bias))
        found.append(('decoder bias', 'tokens', dict(enumerate(of_bias))))
    found += [(part, 'rank correlation with the unigram', spearmanr(logits[:n_ids].cpu(), unigram[:n_ids].cpu())[0]),
              (part, 'tokens shared with the mean embedding', len({*tokens} & {*top_tokens(model.head(embedding))})),
              (part, 'cosine with the mean embedding', F.cosine_similarity(decoded, embedding, 0))]
    directions = F.normalize(means, dim=-1)
    pairs = (directions @ directions.T)[~torch.eye(len(means), dtype=torch.bool, device=mean.device)]
    if len(pairs):
        found += [(part, 'cosine between batches', pairs.mean()),
                  (part, 'cosine between batches deviation', pairs.std(correction=0))]
    if model.config.decoder_bias:
        found.append((part, 'tokens shared with the decoder bias', len({*tokens} & {*of_bias})))
    return found


@torch.no_grad()
def measure(model, batches, unigram, show) -> pd.DataFrame:
    """Return all measurements as rows (part, name, x, value); x is '' for a single number.

    unigram (V,): counts of training tokens; show(id): text of a token.
    """
    unrolled = [unroll(model, idx) for idx, _ in batches]
    states, log_decay = (torch.cat(x) for x in zip(*unrolled))
    mean, T = states.mean((0, 1)), states.shape[1]
    found = geometry(states.flatten(0, 1))
    found += direction(model, torch.stack([s.mean((0, 1)) for s, _ in unrolled]), unigram, show)
    running = states.cumsum(1) / torch.arange(1, T + 1, device=states.device).unsqueeze(-1)
    near = F.cosine_similarity(running, mean, dim=-1).mean(0)
    lengths = [t for t in (1, 3, 10, 30, 100, 300, 1000, T) if t <= T]
    found.append(('running mean', 'cosine with the mean', {t: near[t - 1] for t in lengths}))
    lags = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1500, T // 2) if 0 < k < T})
    found += [('cosine', name, dict(zip(lags, values)))
              for name, values in zip(('raw', 'centered'), cosines(states, lags))]

    mean_direction = F.normalize(mean, dim=0)
    tests = {'unchanged': {}, 'no mean direction in the decoded state': dict(without=mean_direction),
             'no mean direction in the recurrent state': dict(without=mean_direction, carried=True)}
    if log_decay.shape[-1]:
        retained = retention(log_decay, lags)
        lives = [lifetime(own, lags) for own in retained]
        found += [('retention', f'head {h}', dict(zip(lags, own))) for h, own in enumerate(retained)]
        found += [('lifetime', f'head {h}', life) for h, life in enumerate(lives)]
        for pool, heads in zip(('fast', 'slow'), pools(lives)):
            found.append(('pool', f'{pool} heads', str(heads)))
            if heads:
                tests[f'{pool} heads {heads} off'] = dict(heads_off=heads)
    for name, edits in tests.items():
        nats, length = evaluate(model, batches, **edits)
        found += [('perplexity', name, nats.mean().exp()), ('magnitude', name, length)]
    rows = [(part, name, x, value if isinstance(value, (int, str)) else float(value)) for part, name, values in found
            for x, value in (values if isinstance(values, dict) else {'': values}).items()]
    return pd.DataFrame(rows, columns=['part', 'name', 'x', 'value'], dtype=object)


PANELS = {  # part of the rows: (title, label of x, label of y, scale of x)
    'deviation': ('States: spread of each dimension', 'dimension, sorted', 'standard deviation', 'linear'),
    'correlation': ('States: pairs of dimensions', 'correlation', 'fraction of pairs', 'linear'),
    'variance': ('States: principal components', 'number of components', 'fraction of the variance', 'linear'),
    'running mean': ('States: mean over a window', 'tokens averaged', 'cosine with the mean of all', 'log'),
    'cosine': ('States: similarity over time', 'lag k, tokens', 'cosine of states k apart', 'log'),
    'retention': ('Memory: what is left of a write', 'lag k, tokens', 'fraction left', 'log'),
    'perplexity': ('Ablations: loss', 'validation perplexity', '', 'log')}


def plot(rows: pd.DataFrame, name='a GPN'):
    """Draw one panel for each part of PANELS that rows have."""
    parts = [part for part in PANELS if part in {*rows.part}]
    figure, axes = figures.new_figure(f'State and memory of {name}', len(parts), (5, 4))
    for ax, part in zip(axes, parts):
        (title, x_label, y_label, scale), own = PANELS[part], rows[rows.part == part].rename(columns={'name': 'label'})
        if part == 'perplexity':
            ax.barh(own.label, own.value)
        else:
            figures.draw(ax, own, 'x', 'value', marker='o' if scale == 'log' else None)
        if part in ('cosine', 'retention'):
            ax.legend(fontsize='x-small')
        ax.set(xlabel=x_label, ylabel=y_label, xscale=scale, title=title)
    return figure


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    if len(runs) > 1:
        raise UserError(f'expected one run, got {len(runs)}')
    folder = runs.folder[0]
    model, data, record = models.load(folder, s, 'ground_input', 'first_state', 'step')
    if model.config.eos_id is not None:
        raise UserError(f'{folder} starts each document with an empty state: expected a run with '
                        '--mask_documents=False')
    device = model.fuse.weight.device
    T = data.T or record['settings']['block_size']  # tasks have a row length T
    batch_size = s.batch_size or max(1, 16_384 // (s.batches * T))  # paper, section 7.1: 8 batches of 2,048 states
    if (n_windows := data.n_rows('val', T)) < (wanted := s.batches * batch_size):
        raise UserError(f'{data.folder} has {n_windows} validation windows of {T} tokens, fewer than {s.batches} '
                        f'batches of {batch_size}: lower batches or batch_size')
    batches = [*models.val_windows(data, T, wanted * T, batch_size, device)]
    counted, _ = data.train_batch(0, max(1, s.unigram_tokens // T), T, seed=0)
    unigram = torch.bincount(counted.flatten(), minlength=data.n_ids).to(device)
    tokenizer = load_tokenizer(record['data']['tokenizer'])
    rows = measure(model, batches, unigram, lambda i: tokenizer.decode([i]).decode(errors='replace'))
    figures.show(rows[(rows.x == '') | (rows['name'] == 'tokens')])  # curves: see the figure
    return {'.csv': rows, '.png': plot(rows, named(runs, s.labels).label[0])}


if __name__ == '__main__':
    main()
