"""Validation loss. With several processes, each evaluates a share of the windows."""
import math

import torch

from attn_kernels import counted_targets
from lm_architectures.files import UserError
from lm_architectures.machine.parallel import all_gather, rank, world


def validation_loss(model, data, *args) -> tuple[dict[str, float], int]:
    """Return `loss_on_source`, for a mixture the weighted means, and each source's nll by name."""
    means, by_source, n_counted = {}, {}, 0
    for name, (share, source) in data.sources.items():
        parts, n = loss_on_source(model, source, *args)
        means = {part: means.get(part, 0) + share * mean for part, mean in parts.items()}
        by_source[name] = parts['nll']
        n_counted += n
    return (by_source if len(by_source) > 1 else {}) | means, n_counted


@torch.no_grad()
def loss_on_source(model, data, T: int, n_tokens: int | None, seed: int | None, batch_size: int,
                   device) -> tuple[dict[str, float], int]:
    """Return ({loss part: mean}, number of counted tokens) on validation windows of T tokens.

    n_tokens: tokens to evaluate, in windows at random offsets (seed) or in order (seed None). None
    or more than there are: all validation tokens, in order. A loss part that averages over other
    positions than 'nll' is the mean of its batch means.
    """
    n_all = data.splits['val']['tokens']
    if n_tokens is None or n_tokens >= n_all:
        n_targets = n_all - (data.T is None)  # a text's first token is not predicted
        seed, n_windows = None, math.ceil(n_targets / T)
    else:
        n_windows = max(1, n_tokens // T)
    totals, n_counted = {}, 0
    mine = range(rank(), n_windows, world())
    for start in range(0, len(mine), batch_size):
        idx, targets = data.val_batch(mine[start:start + batch_size], T, seed)
        count = int((counted_targets(idx, targets, model.config.eos_id) >= 0).sum())
        if not count:  # the model's mean over no token would be NaN
            continue
        for name, mean in model(idx.to(device), targets.to(device)).items():
            totals[name] = totals.get(name, 0.0) + mean.item() * count
        n_counted += count
    shares, counts = zip(*all_gather((totals, n_counted)))
    if not any(counts):
        raise UserError(f'every validation input of {data.folder} ends a text: give longer documents or more tokens')
    sums = {name: sum(totals.get(name, 0.0) for totals in shares) for totals in shares for name in totals}
    return {name: total / sum(counts) for name, total in sums.items()}, sum(counts)
