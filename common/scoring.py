"""Judging a model on tokens: validation loss, and log-likelihoods of continuations. Processes share the work."""
import functools
import math
from collections.abc import Iterator
from math import inf

import torch
import torch.nn.functional as F

from common.decoding import pad, roomy_cache
from common.extend_check import MAX_LOGITS, decodable
from common.files import UserError
from common.parallel import of_all, rank, world

SHARED = 64  # continuations of up to so many tokens share one reading of their context


# ---- validation loss ----

def counted(idx, targets, eos_id: int | None) -> int:
    """How many positions the loss is a mean over: a target that counts, and an input that does not end a document."""
    mask = targets >= 0
    if eos_id is not None:
        mask &= idx != eos_id
    return int(mask.sum())


@torch.no_grad()
def validation_loss(model, data, T: int, n_tokens: int | None, seed: int | None, batch_size: int, device,
                    from_logits: bool = False) -> tuple[dict[str, float], int]:
    """({part of the loss: mean over the tokens that count}, how many count) on validation windows of T tokens.

    n_tokens: of so many tokens, whose windows lie at random offsets by `seed`, or with seed None one after the other
    from the start. Where the split has no more than n_tokens, or n_tokens is None: all of it, in order. The windows are
    the same for any number of processes. 'nll' is in nats per token; a part that counts other positions than the nll is
    a mean of the batches' means. Summed in float64. from_logits: `loss_from_logits` in place of the model's own loss.
    """
    n_windows = data.n_windows('val', T)
    if n_tokens is None or n_tokens // T >= n_windows:
        seed = None
    else:
        n_windows = max(1, n_tokens // T)
    find_loss = functools.partial(loss_from_logits, model) if from_logits else model
    totals, n_counted = {}, 0
    mine = range(rank(), n_windows, world())
    for start in range(0, len(mine), batch_size):
        idx, targets = data.val_batch(mine[start:start + batch_size], T, seed)
        count = counted(idx, targets, model.config.eos_id)
        for name, mean in find_loss(idx.to(device), targets.to(device)).items():
            totals[name] = totals.get(name, 0.0) + mean.item() * count
        n_counted += count
    shares = of_all((totals, n_counted))
    n_counted = sum(count for _, count in shares)
    names = dict.fromkeys(name for totals, _ in shares for name in totals)
    return {name: sum(totals.get(name, 0.0) for totals, _ in shares) / n_counted for name in names}, n_counted


def loss_from_logits(model, idx, targets) -> dict[str, torch.Tensor]:
    """{'nll'} of idx and targets (B, T) as the model's own forward counts it, but by the logits that it decodes with.

    So a head of 8-bit weights is judged, where the fused loss would read it as a plain matrix.
    """
    if model.config.eos_id is not None:
        targets = targets.masked_fill(idx == model.config.eos_id, -1)
    n_rows = max(1, MAX_LOGITS // (idx.shape[1] * model.config.vocab_size))
    nats = [F.cross_entropy(model.logits(rows).flatten(0, 1).float(), wanted.flatten(), ignore_index=-1,
                            reduction='sum') for rows, wanted in zip(idx.split(n_rows), targets.split(n_rows))]
    return {'nll': sum(nats) / (targets >= 0).sum().clamp(min=1)}


def perplexity(nats: float) -> float:
    """exp of nats per token; infinite where that is beyond the largest float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return inf


# ---- log-likelihoods ----

class Scorer:
    """Log-likelihoods of continuations under a model, in batches; with several processes each takes its share."""

    def __init__(self, model, max_length: int, batch_tokens: int = 16384, batch_size: int | None = None,
                 max_logits: int = MAX_LOGITS):
        """max_length: tokens that the model sees at most. A batch has at most batch_tokens tokens, padding included."""
        self.model, self.max_length, self.max_logits = model, max_length, max_logits
        self.batch_tokens, self.batch_size = batch_tokens, batch_size or inf
        self.device = next(model.parameters()).device
        self.truncated = 0  # requests whose context lost its start

    @functools.cached_property
    def reader(self):
        """The model, with `extend` in any case."""
        return decodable(self.model)

    def score(self, requests: list[tuple]) -> list[tuple[float, bool, bool]]:
        """requests [(context ids, continuation ids)], none empty -> [(log-likelihood in nats, greedy, first greedy)].

        Requests with equal contexts are read together: one prefill, then each continuation, rolled back after it.
        """
        results = {}
        for number, batch in enumerate(self._batches(self._groups(requests))):
            if number % world() == rank():
                results |= self._score_batch(batch)
        results = {i: result for share in of_all(results) for i, result in share.items()}
        return [results[i] for i in range(len(requests))]

    def _groups(self, requests) -> list[tuple]:
        """[(context, [(index of a request, its continuation)])], those of like length one after the other."""
        groups = {}
        for i, (context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise UserError('a request has an empty context or continuation: each needs at least one token')
            if len(continuation) > self.max_length:
                raise UserError(f'a continuation of {len(continuation)} tokens does not fit '
                                f'max_length = {self.max_length}')
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, never read
            self.truncated += len(context) > room
            context = tuple(context[-room:])
            alone = None if len(continuation) <= SHARED else i
            groups.setdefault((context, alone), []).append((i, continuation))

        def order(group):
            context, members = group
            longest = max(len(continuation) for _, continuation in members) if len(members) == 1 else 0
            return -longest, -len(context), -len(members)
        return sorted(((context, members) for (context, _), members in groups.items()), key=order)

    def _batches(self, groups) -> Iterator[list]:
        """Cuts sorted groups into batches whose padded tokens and logits stay within bounds."""
        batch, widths = [], (0, 0)
        for context, members in groups:
            own = len(context), max(len(continuation) for _, continuation in members)
            wider = max(widths[0], own[0]), max(widths[1], own[1])
            n_rows = len(batch) + 1
            n_logits = n_rows * wider[1] * self.model.config.vocab_size
            is_full = n_rows * sum(wider) > self.batch_tokens or n_logits > self.max_logits or n_rows > self.batch_size
            if batch and is_full:
                yield batch
                batch, wider = [], own
            batch.append((context, members))
            widths = wider
        if batch:
            yield batch

    def _score_batch(self, batch) -> dict:
        """{index of a request: result} of groups of requests, a row each. A batch too big for the GPU is cut in two."""
        try:
            return self._score_rows(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        return self._score_batch(batch[:len(batch) // 2]) | self._score_batch(batch[len(batch) // 2:])

    @torch.inference_mode()
    def _score_rows(self, batch):
        contexts = [context for context, _ in batch]
        n_turns = max(len(members) for _, members in batch)
        longest = max(len(continuation) for _, members in batch for _, continuation in members)
        max_run = longest
        if len(batch) == n_turns == 1:  # a long continuation is read in pieces, so that its logits stay within bounds
            max_run = min(longest, max(1, self.max_logits // self.model.config.vocab_size))
        cache = roomy_cache(self.model, contexts, longest, max_run)
        tokens, lengths = pad(contexts, self.device)
        first_logits = self.reader.extend(tokens, cache, lengths)
        results = {}
        for turn in range(n_turns):
            members = [members[turn] if turn < len(members) else (None, [0]) for _, members in batch]
            targets, lengths = pad([continuation for _, continuation in members], self.device)
            nats, is_greedy = self._judge_turn(first_logits, targets, lengths, cache, max_run, turn + 1 < n_turns)
            is_counted = torch.arange(targets.shape[1], device=self.device) < lengths[:, None]
            totals, all_greedy = (nats * is_counted).sum(1).tolist(), (is_greedy | ~is_counted).all(1).tolist()
            judged = zip(totals, all_greedy, is_greedy[:, 0].tolist())
            results |= {i: result for (i, _), result in zip(members, judged) if i is not None}
        return results

    def _judge_turn(self, first_logits, targets, lengths, cache, max_run, forget):
        """Log-probabilities of a continuation a row (B, n), and whether each token is the likeliest.

        first_logits (B, V) follow the context. The continuation's tokens but the last are read in runs of max_run, of
        which there are several only where one row is alone. With `forget` the cache ends as it began.
        """
        judged = [judge(first_logits[:, None], targets[:, :1])]
        n_read = targets.shape[1] - 1
        for start in range(0, n_read, max_run):
            tokens = targets[:, start:min(start + max_run, n_read)]
            n_new = (lengths - 1).clamp(1, tokens.shape[1]) if len(targets) > 1 else None
            logits = self.reader.extend(tokens, cache, n_new, all_positions=True)
            judged.append(judge(logits, targets[:, start + 1:start + 1 + tokens.shape[1]]))
        if forget and n_read:
            cache.rollback(tokens.shape[1] if n_new is None else n_new)
        return (torch.cat(parts, 1) for parts in zip(*judged))


def judge(logits, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of targets (B, n) under logits (B, n, V), fp64 (B, n), and whether each is the likeliest."""
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    dtype = torch.float32 if logits.device.type == 'mps' else torch.float64  # Apple GPUs have no fp64
    return (chosen.float() - logits.float().logsumexp(-1)).to(dtype), logits.argmax(-1) == targets
