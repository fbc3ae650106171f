"""Speculative decoding: `speculative_generate`.

A round: draft n tokens, append the last token and the draft to the cache in one `extend`, keep what the rule of `verify` accepts, and
draw one token more. The rule makes the distribution of the text that of plain decoding, whatever drafts.
"""
import time
from math import inf

import torch

from common.decoding import draw, pad, record_graph, roomy_cache, token_probs

LONGEST_AUTO = 16  # tokens that auto drafts at most


def verify(p, q, drafts, lengths, uniform, noise):
    """Speculative sampling (Leviathan et al. 2022): how many drafted tokens are accepted (B,), and the token after them (B,).

    p (B, n + 1, V) is the model's law at each position, q (B, n, V) that of which drafts (B, n) were drawn; lengths (B,) of them
    count in each row. Token x is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from
    max(p - q, 0), normalised; after all of them comes a draw from p. uniform (B, n) in [0, 1), noise (B, V) as for `draw`.
    """
    rows, n = torch.arange(len(p), device=p.device), drafts.shape[1]
    if n == 0:
        return torch.zeros_like(lengths), draw(p[:, 0], noise)
    p_draft, q_draft = (x[:, :n].gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    counted = torch.arange(n, device=p.device) < lengths[:, None]
    accepted = (accepts(p_draft, q_draft, uniform) & counted).long().cumprod(1).sum(1)
    law = p[rows, accepted]
    rest = (law - q[rows, accepted.clamp(max=n - 1)]).clamp(min=0)
    replace = (accepted < lengths) & (rest.sum(-1) > 0)  # rounding may leave no rest
    return accepted, draw(torch.where(replace[:, None], rest, law), noise)


def accepts(p, q, uniform):
    """Whether a token of probability p, drawn with probability q, is accepted."""
    return uniform * q < p


class OwnDraft:
    """Drafts by the model itself: its `draft`."""

    def __init__(self, model, cache):
        self.model, self.cache, self.longest = model, cache, model.longest_draft

    def first(self, tokens, lengths, token):
        pass

    def step(self, i, token, pick):
        """Draws token i of the draft, after `token` (B,): (B,), and its law (B, V). Doing it again changes nothing."""
        self.cache.drafted = i  # a replayed graph does not count
        tokens, probs = self.model.draft(token, self.cache, 1, pick)
        return tokens[:, 0], probs[:, 0]

    def keep(self, n, drafts, accepted, token, live):
        pass


class RunDraft:
    """Drafts by another model, of any architecture: only the last run of a cache can be forgotten, so each step reads the whole
    draft so far as one run, which costs little more than its last token."""

    def __init__(self, model, prompts, max_new_tokens, longest):
        self.model, self.cache = model, roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)

    def first(self, tokens, lengths, token):
        """Reads the prompts; `token` (B,) comes after them."""
        self.model.extend(tokens, self.cache, lengths)
        self.run = torch.zeros(len(tokens), self.cache.max_run, dtype=torch.int64, device=tokens.device)
        self.run[:, 0] = token
        self.pending = torch.ones_like(lengths)  # tokens of the text that the cache has not, 1 or 2: the first ones of the run
        self.held = torch.zeros_like(lengths)  # tokens of the run that are in the cache
        self.rows = torch.arange(len(tokens), device=tokens.device)

    def step(self, i, token, pick):
        """As `OwnDraft.step`."""
        if i > 0:
            self.run[self.rows, self.pending + i - 1] = token
        self.cache.rollback(self.held)
        width = i + (int(self.pending.max()) if token.device.type == 'cpu' else 2)
        self.held.copy_(self.pending + i)
        return pick(self.model.extend(self.run[:, :min(width, self.run.shape[1])], self.cache, self.held))

    def keep(self, n, drafts, accepted, token, live):
        """After a round with drafts (B, n): forgets what was not accepted (B,); `token` comes next. Rows not live stay as they were."""
        if n == 0:  # every row is at its end
            return
        self.cache.rollback(torch.where(live, n - 1 - accepted.clamp(max=n - 1), self.held))
        self.held.zero_()
        all_of_it = accepted == n  # then the last drafted token was never read
        first = torch.where(all_of_it, drafts[:, n - 1], token)
        self.run[:, 0] = torch.where(live, first, self.run[:, 0])
        self.run[:, 1] = torch.where(live, token, self.run[:, 1])
        self.pending = torch.where(live, 1 + all_of_it.long(), self.pending)


class DraftStatistics:
    """What became of the drafts: `tried` and `accepted` by position; over all rows their rounds, tokens drafted and tokens made."""

    def __init__(self):
        self.tried, self.accepted, self.rounds, self.drafted, self.tokens = [], [], 0, 0, 0

    def add(self, length, accepted):
        """A row's draft of `length` tokens, of which the first `accepted` were accepted."""
        self.rounds += 1
        self.drafted += length
        self.tokens += accepted + 1
        for counts, n in ((self.tried, min(length, accepted + 1)), (self.accepted, accepted)):
            counts += [0] * (length - len(counts))
            for i in range(n):
                counts[i] += 1

    @property
    def accepted_per_step(self):
        return sum(self.accepted) / max(1, self.rounds)

    @property
    def by_position(self):
        """Share of the tokens at each position of a draft that are accepted, of those whose turn comes."""
        return [a / t for a, t in zip(self.accepted, self.tried) if t]


class AutoLength:
    """Decides after each drafted token whether to draft another; pass it on to the next call, for it learns.

    A round of n drafted tokens takes V + n D seconds: V a verification of nothing, D drafting and verifying one token more. It
    yields one token and those accepted: 1 + a + a^2 + ... + a^n, if a of the tokens are accepted where their turn comes. R is the
    most tokens per second that any n would make so. One more drafted token costs D seconds, in which R D tokens could be made; it
    gives, in each row, the probability that all of the draft and it too are accepted. It is drafted while it gives more than it costs.
    A drafted token is taken to be accepted as often as those before it of like confidence (the draft's own probability for it),
    and the one to come as often as all before it. V and D are a line through the times of earlier rounds. The rows of a batch
    share a round's time, so they share its length: a row that stopped alone would save nothing. That a token is drafted depends on
    those before it only, never on itself, so the text keeps its law; its length depends on the clock, unless the cost is given.
    """

    BINS = 10

    def __init__(self, cost=None):
        """cost: D / V, fixed instead of measured."""
        self.cost = cost
        self.rounds = [0.0] * 5  # sums over rounds of 1, n, t, n^2, n t for t seconds, later ones counting more
        self.bins = [[1.5, 2.0] for _ in range(self.BINS)]  # accepted, tried: a start

    def model(self):
        """V and D in one unit."""
        weight, n, t, nn, nt = self.rounds
        if self.cost or not weight:
            return 1.0, self.cost or 0.1
        n, t = n / weight, t / weight
        slope = (nt - weight * n * t + 0.1 * t) / (nn - weight * n * n + 1)  # as if one more round had shown 0.1 t a token
        slope = min(max(slope, 0.01 * t), t / (n + 1))
        return t - slope * n, slope

    def begin(self, n_rows):
        """Before a round: `share` of drafted tokens that are accepted, and `price`, the probability at which another pays."""
        V, D = self.model()
        accepted, tried = (sum(counts) for counts in zip(*self.bins))
        self.share, self.drafts, self.survive = accepted / tried, [], [1.0] * n_rows
        tokens, gain, rate = 1.0, 1.0, 1 / V
        for n in range(1, LONGEST_AUTO + 1):
            gain *= self.share
            tokens += gain
            if tokens / (V + n * D) < rate:
                break
            rate = tokens / (V + n * D)
        self.price = rate * D

    def more(self, confidences):
        """Whether to draft another token. confidences: of the token just drafted, for each row that goes on."""
        bins = [self.bins[min(int(c * self.BINS), self.BINS - 1)] for c in confidences]
        self.drafts.append(bins)
        self.survive = [before * accepted / tried for before, (accepted, tried) in zip(self.survive, bins)]
        return self.share * sum(self.survive) > len(bins) * self.price

    def learn(self, outcomes, seconds):
        """After a round. outcomes: (length, accepted) of each row that went on; seconds that the round took, None: not typical."""
        n = len(self.drafts)
        if seconds is not None:
            V, D = self.model()
            t = min(seconds, 2 * (V + n * D)) if self.rounds[0] else seconds  # a pause of the machine counts little
            self.rounds = [0.99 * total + x for total, x in zip(self.rounds, (1, n, t, n * n, n * t))]
        for row, (length, accepted) in enumerate(outcomes):
            for i in range(min(length, accepted + 1)):
                counts = self.drafts[i][row]
                counts[0] += i < accepted
                counts[1] += 1


class SpeculativeDecoder:
    """Decodes a draft and one token a row and round. On a GPU each step of a draft and each verification is a CUDA graph."""

    def __init__(self, model, cache, drafter, longest, filters, generator):
        self.model, self.cache, self.drafter, self.longest, self.filters = model, cache, drafter, longest, filters
        self.generator, self.greedy = generator, filters['temperature'] == 0
        self.graphs = {}

    def first(self, tokens, lengths):
        """Reads the prompts (B, n), right-padded to lengths; returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        B, V, device = *logits.shape, logits.device
        self.noise = torch.ones(B, V, device=device)
        self.uniform = torch.full((B, self.longest), 0.5, device=device)
        self.drafts = torch.zeros(B, self.longest, dtype=torch.int64, device=device)
        self.probs = torch.zeros(B, self.longest, V, device=device)  # the law that each drafted token was drawn from
        self.confidences = torch.zeros(B, self.longest, device=device)  # the draft's probability for it, without filters
        self.lengths, self.accepted = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.live = torch.ones_like(lengths, dtype=torch.bool)
        self.refresh(self.noise)
        self.token = self.pick(logits)[0]
        self.drafter.first(tokens, lengths, self.token)
        return self.token

    def refresh(self, noise, uniform=None):
        """New random numbers; greedy decoding needs none."""
        if not self.greedy:
            noise.exponential_(generator=self.generator)
            if uniform is not None:
                uniform.uniform_(generator=self.generator)

    def pick(self, logits):
        """A token (B,) for logits (B, V), and the law it is from."""
        probs = token_probs(logits, **self.filters)
        return draw(probs, self.noise), probs

    def draft(self, i):
        """Drafts token i of the round; i = 0, 1, ... in turn."""
        self.refresh(self.noise)
        self.run(('draft', i), lambda: self.draft_step(i), lambda: None)

    def draft_step(self, i):
        def pick(logits):
            token, probs = self.pick(logits)
            self.confidences[:, i] = logits.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1).exp()
            return token, probs
        self.drafts[:, i], self.probs[:, i] = self.drafter.step(i, self.token if i == 0 else self.drafts[:, i - 1], pick)

    def verify(self, n, lengths, live):
        """Verifies the n tokens drafted, `lengths` (B,) of which count; rows that are not live (B,) stay as they are.

        Afterwards `accepted` and `token` hold what came of it, `drafts` the text before `token`.
        """
        self.lengths.copy_(lengths)
        self.live.copy_(live)
        self.refresh(self.noise, self.uniform)
        before = self.token.clone()

        def undo():
            self.cache.rollback(torch.where(self.live, self.accepted + 1, 0))
            self.token.copy_(before)
        self.run(('verify', n), lambda: self.verify_step(n), undo)
        self.drafter.keep(n, self.drafts[:, :n], self.accepted, self.token, self.live)

    def verify_step(self, n):
        drafts = self.drafts[:, :n]
        logits = self.model.extend(torch.cat([self.token[:, None], drafts], 1), self.cache, self.lengths + 1, all_positions=True)
        p = token_probs(logits, **self.filters)
        accepted, token = verify(p, self.probs[:, :n], drafts, self.lengths, self.uniform[:, :n], self.noise)
        self.cache.rollback(torch.where(self.live, self.lengths - accepted, self.lengths + 1))
        self.accepted.copy_(accepted)
        self.token.copy_(token)

    def run(self, name, step, undo):
        """Does a step: on a GPU as a graph, recorded the first time."""
        if self.token.device.type != 'cuda':
            return step()
        if name not in self.graphs:
            self.graphs[name] = record_graph(step, undo)
        self.graphs[name].replay()


@torch.inference_mode()
def speculative_generate(model, prompts, max_new_tokens, *, draft=None, draft_len='auto', temperature=1.0, top_k=None, top_p=None,
                         min_p=None, seed=0, eos_id=None, finished=None, on_tokens=None, auto=None):
    """`generate` with drafts: the same law of texts, in fewer steps. Returns the new ids of each prompt, and DraftStatistics.

    draft: a second model with the same vocabulary, or None: the model drafts for itself. draft_len: tokens a draft, or 'auto'
    (by `auto`, an `AutoLength`; None: a new one). Greedy texts are those of `generate` but for rounding where two logits are equal. Raises
    ValueError for a model that cannot draft, or not so many tokens.
    """
    longest = longest_draft(model, draft, draft_len)
    if not prompts or not all(prompts):
        raise ValueError('a prompt is empty: each needs at least one token')
    statistics = DraftStatistics()
    if max_new_tokens < 1:
        return [[] for _ in prompts], statistics
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # where the graphs are captured
    cache = roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)
    drafter = OwnDraft(model, cache) if draft is None else RunDraft(draft, prompts, max_new_tokens, longest)
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    decoder = SpeculativeDecoder(model, cache, drafter, longest, filters, torch.Generator(device).manual_seed(seed))
    auto = (auto or AutoLength()) if draft_len == 'auto' else None
    new, live, lengths_seen = [[] for _ in prompts], [True] * len(prompts), set()

    def append(row, ids):
        for token in ids:
            if live[row]:
                new[row].append(token)
                live[row] = not (token == eos_id or (finished is not None and finished(row, new[row])) or len(new[row]) == max_new_tokens)

    for row, token in enumerate(decoder.first(*pad(prompts, device)).tolist()):
        append(row, [token])
    while any(live):
        start, rows = time.perf_counter(), [row for row, goes_on in enumerate(live) if goes_on]
        lengths = [max_new_tokens - len(ids) - 1 if goes_on else 0 for ids, goes_on in zip(new, live)]  # what a row has room for
        most = longest if device.type == 'cuda' else min(longest, max(lengths))  # another length would be another graph
        n = drafted(decoder, auto, most, rows)
        lengths = [min(n, room) for room in lengths]
        decoder.verify(n, torch.tensor(lengths, device=device), torch.tensor(live, device=device))
        accepted, token, drafts = decoder.accepted.tolist(), decoder.token.tolist(), decoder.drafts.tolist()
        seconds = time.perf_counter() - start
        for row in rows:
            statistics.add(lengths[row], accepted[row])
            append(row, drafts[row][:accepted[row]] + [token[row]])
        if on_tokens:
            on_tokens(new)
        if auto:  # the first round of a length also prepares: graphs, memory
            auto.learn([(lengths[row], accepted[row]) for row in rows], seconds if n in lengths_seen else None)
            lengths_seen.add(n)
    return new, statistics


def drafted(decoder, auto, longest, rows):
    """Drafts up to `longest` tokens, with auto as many as are worth it for the rows that go on, at least one. Returns how many."""
    if auto:
        auto.begin(len(rows))
    for n in range(longest):
        decoder.draft(n)
        if auto:
            confidences = decoder.confidences[:, n].tolist()
            if not auto.more([confidences[row] for row in rows]):
                return n + 1
    return longest


def longest_draft(model, draft, draft_len):
    """The longest draft that draft_len asks for; ValueError if it is no length, or not one of the model's."""
    longest = inf if draft is not None else getattr(model, 'longest_draft', 0)
    if draft_len != 'auto' and not (isinstance(draft_len, int) and draft_len >= 1):
        raise ValueError(f'draft_len = {draft_len!r}: expected at least 1 token, or auto')
    if longest < 1:
        raise ValueError(f'{type(model).__module__} cannot draft for itself as it was trained: give a second run that drafts')
    if draft_len != 'auto' and draft_len > longest:
        raise ValueError(f'draft_len = {draft_len}: this model drafts up to {longest} tokens')
    if draft is not None and (draft.config.vocab_size, draft.config.n_ids) != (model.config.vocab_size, model.config.n_ids):
        raise ValueError(f'the draft has {draft.config.n_ids} ids in {draft.config.vocab_size} rows, the model {model.config.n_ids} in '
                         f'{model.config.vocab_size}: they must have one vocabulary')
    return min(longest, LONGEST_AUTO) if draft_len == 'auto' else draft_len
