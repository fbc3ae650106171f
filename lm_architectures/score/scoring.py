"""Log-likelihoods of continuations, for eval.py's tasks and corpora. Processes share the work."""
import math
from collections.abc import Iterator

import torch

from lm_architectures.decode.generation import allocate_cache, decodable, pad
from lm_architectures.files import UserError
from lm_architectures.machine.parallel import all_gather, rank, world

MAX_SHARED = 64  # requests with continuations up to this length share the prefill of their context


class Scorer:
    """Compute log-likelihoods of continuations under a model, in batches."""

    def __init__(self, model, max_length: int, batch_tokens: int = 16384, max_logits: int = 2 ** 26):
        """max_length: context length. batch_tokens: maximum tokens per batch, including padding."""
        self.model, self.max_length, self.batch_tokens, self.max_logits = model, max_length, batch_tokens, max_logits
        self.max_call = max(1, max_logits // model.config.vocab_size)  # tokens of one row in a call
        self.truncated = 0  # requests whose context was cut

    def score(self, requests: list[tuple]) -> list[tuple[float, bool, bool]]:
        """Score requests [(context ids, continuation ids)], none of them empty.

        Returns [(log-likelihood in nats, whether all tokens are the argmax, whether the first is)].
        Requests with the same context share one prefill; the cache is rolled back in between.
        """
        results = {}
        for number, batch in enumerate(self._batches(self._groups(requests))):
            if number % world() == rank():
                results |= score_batch(self.model, batch, self.max_call)
        results = {i: result for share in all_gather(results) for i, result in share.items()}
        return [results[i] for i in range(len(requests))]

    def _groups(self, requests) -> list[tuple]:
        """Group by context: [(context, [(index of request, its continuation)])], longest first."""
        groups = {}
        for i, (context, continuation) in enumerate(requests):
            if not context or not continuation:
                raise UserError('a request has an empty context or continuation: give each at least one token')
            if len(continuation) > self.max_length:
                raise UserError(f'a continuation of {len(continuation)} tokens exceeds max_length = {self.max_length}: '
                                'give a larger --max_length')
            room = self.max_length + 1 - len(continuation)  # the last token is only predicted
            self.truncated += len(context) > room
            alone = None if len(continuation) <= min(MAX_SHARED, self.max_call) else i
            groups.setdefault((tuple(context[-room:]), alone), []).append((i, continuation))

        def order(group):  # for little padding: single requests by continuation, questions by context
            context, members = group
            longest = len(members[0][1]) if len(members) == 1 else 0
            return -longest, -len(context), -len(members)
        return sorted(((context, members) for (context, _), members in groups.items()), key=order)

    def _batches(self, groups) -> Iterator[list]:
        """Cut sorted groups into batches with bounded numbers of padded tokens and logits."""
        batch, widths = [], (0, 0)
        for context, members in groups:
            own = len(context), max(len(continuation) for _, continuation in members)
            widths = tuple(map(max, widths, own))
            n_rows = len(batch) + 1
            n_logits = n_rows * widths[1] * self.model.config.vocab_size
            if batch and (n_rows * sum(widths) > self.batch_tokens or n_logits > self.max_logits):
                yield batch
                batch, widths = [], own
            batch.append((context, members))
        if batch:
            yield batch


@torch.inference_mode()
def score_batch(model, batch: list[tuple], max_call: int) -> dict:
    """Score groups of requests, one row each. Returns {index of a request: result}.

    Feeds at most max_call tokens of a continuation at a time. Only a batch of one row needs more
    than one call, so a rollback of the last call forgets the whole continuation.
    """
    contexts, device = [context for context, _ in batch], next(model.parameters()).device
    n_turns = max(len(members) for _, members in batch)
    longest = max(len(continuation) for _, members in batch for _, continuation in members)
    model, cache, results = decodable(model), allocate_cache(model, contexts, longest, min(longest, max_call)), {}
    tokens, lengths = pad(contexts, device)
    first_logits = model.extend(tokens, cache, lengths)
    for turn in range(n_turns):
        requests = [members[turn] if turn < len(members) else (None, [0]) for _, members in batch]
        targets, lengths = pad([continuation for _, continuation in requests], device)
        parts = [target_log_probs(first_logits[:, None], targets[:, :1])]
        pieces = targets[:, :-1].split(max_call, 1) if targets.shape[1] > 1 else ()
        for tokens, wanted in zip(pieces, targets[:, 1:].split(max_call, 1)):
            n_new = (lengths - 1).clamp(1, tokens.shape[1])
            parts.append(target_log_probs(model.extend(tokens, cache, n_new, all_positions=True), wanted))
        if pieces and turn + 1 < n_turns:
            cache.rollback(n_new)
        nats, is_greedy = (torch.cat(values, 1) for values in zip(*parts))
        is_counted = torch.arange(targets.shape[1], device=device) < lengths[:, None]
        totals, all_greedy = (nats * is_counted).sum(1).tolist(), (is_greedy | ~is_counted).all(1).tolist()
        found = zip(totals, all_greedy, is_greedy[:, 0].tolist())
        results |= {i: result for (i, _), result in zip(requests, found) if i is not None}
    return results


def target_log_probs(logits, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (fp64) of targets (B, n) under logits (B, n, V), and argmax hits."""
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    dtype = torch.float32 if logits.device.type == 'mps' else torch.float64  # Apple GPUs have no fp64
    return (chosen.float() - logits.float().logsumexp(-1)).to(dtype), logits.argmax(-1) == targets


def perplexity(nats: float) -> float:
    """Return exp(nats per token); infinity on overflow."""
    return math.inf if nats >= 709 else math.exp(nats)
