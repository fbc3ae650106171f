"""Speculative decoding: `speculative_generate`.

A round drafts n tokens, appends the last token and the draft to the cache in one `extend`, keeps the tokens that
`verify` accepts, and draws one more. The text has the same distribution as with plain decoding, whatever the draft is.

Read `verify` first, then `speculative_generate`. `OwnDraft` and `RunDraft` make drafts; `AutoLength` decides how long
they are.
"""
from math import inf

import torch
import torch.nn as nn

from common.decoding import (
    check_logits,
    check_prompts,
    check_sampling,
    decodable,
    draw,
    has_graphs,
    pad,
    record_graph,
    roomy_cache,
    token_probs,
)

LONGEST_AUTO = 16  # most tokens of a draft with draft_len 'auto'
LONGEST = 1000  # most tokens of any draft


def verify(p, q, drafts, lengths, uniform, noise) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2022). Returns the number of accepted tokens (B,) and the next token (B,).

    p (B, n + 1, V) is the model's distribution at each position, q (B, n, V) the distribution that drafts (B, n) were
    drawn from; the first lengths (B,) tokens of each row count. Token x is accepted with probability
    min(1, p(x) / q(x)). The first rejected token is replaced by a draw from max(p - q, 0), normalized; if all are
    accepted, one more is drawn from p. uniform (B, n) in [0, 1); noise (B, V) as for `draw`.
    """
    batch_idx, n = torch.arange(len(p), device=p.device), drafts.shape[1]
    if n == 0:
        return torch.zeros_like(lengths), draw(p[:, 0], noise)
    p_draft, q_draft = (x[:, :n].gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    counted = torch.arange(n, device=p.device) < lengths[:, None]
    accepted = (accepts(p_draft, q_draft, uniform) & counted).long().cumprod(1).sum(1)
    p_next = p[batch_idx, accepted]
    rest = (p_next - q[batch_idx, accepted.clamp(max=n - 1)]).clamp(min=0)
    is_rejected = (accepted < lengths) & (rest.sum(-1) > 0)  # rounding may leave no rest
    return accepted, draw(torch.where(is_rejected[:, None], rest, p_next), noise)


def accepts(p, q, uniform) -> torch.Tensor:
    """Return True where the drafted token is accepted: p, q are its target and draft probabilities."""
    return uniform * q < p


@torch.inference_mode()
@torch.autocast('cpu', enabled=False)  # see `generate`
def speculative_generate(model, prompts: list[list[int]], max_new_tokens: int, *, draft=None, draft_len='auto',
                         temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0, eos_id=None, finished=None,
                         on_tokens=None, auto=None) -> tuple[list[list[int]], 'DraftStatistics']:
    """`generate` with drafts: the same distribution of texts in fewer steps. Returns new ids and DraftStatistics.

    draft: a second model with the same vocabulary; None: the model drafts for itself. draft_len: tokens per draft, or
    'auto' (decided by `auto`, an `AutoLength`; None: a new one). Greedy texts equal those of `generate` except where
    rounding breaks a tie between two logits. Raises ValueError like `generate`, and if the model cannot draft or cannot
    draft that many tokens.
    """
    longest = longest_draft(model, draft, draft_len)
    check_prompts(prompts)
    check_sampling(temperature, top_k, top_p, min_p)
    statistics = DraftStatistics()
    if max_new_tokens < 1:
        return [[] for _ in prompts], statistics
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # the graphs are captured there
    cache = roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)
    drafter = OwnDraft(model, cache) if draft is None else RunDraft(draft, prompts, max_new_tokens, longest)
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = SpeculativeDecoder(decodable(model), cache, drafter, longest, filters, generator)
    auto = (auto or AutoLength()) if draft_len == 'auto' else None
    new, live = [[] for _ in prompts], [True] * len(prompts)

    def append(b, ids):
        for token in ids:
            if live[b]:
                new[b].append(token)
                is_done = token == eos_id or (finished is not None and finished(b, new[b]))
                live[b] = not is_done and len(new[b]) < max_new_tokens

    for b, token in enumerate(decoder.read_prompts(*pad(prompts, device)).tolist()):
        append(b, [token])
    if auto and auto.cost is None:
        auto.cost = draft_cost(model, draft, decoder)
    while any(live):
        going = [b for b, is_live in enumerate(live) if is_live]
        room = [max_new_tokens - len(ids) - 1 if is_live else 0 for ids, is_live in zip(new, live)]
        most = longest if device.type == 'cuda' else min(longest, max(room))  # another length would be another graph
        n = draft_tokens(decoder, auto, most, going)
        lengths = [min(n, tokens) for tokens in room]
        decoder.verify(n, torch.tensor(lengths, device=device), torch.tensor(live, device=device))
        accepted, token, drafts = decoder.accepted.tolist(), decoder.token.tolist(), decoder.drafts.tolist()
        for b in going:
            statistics.add(lengths[b], accepted[b])
            append(b, drafts[b][:accepted[b]] + [token[b]])
        if on_tokens:
            on_tokens(new)
        if auto:
            auto.learn([(lengths[b], accepted[b]) for b in going])
    return new, statistics


def draft_tokens(decoder, auto, longest, going) -> int:
    """Draft up to `longest` tokens, with auto as many as pay off, and return how many: at least one.

    going: indices of the rows that are not finished.
    """
    if auto:
        auto.begin(len(going))
    for n in range(longest):
        decoder.draft(n)
        if auto:
            confidences = decoder.confidences[:, n].tolist()
            if not auto.more([confidences[b] for b in going]):
                return n + 1
    return longest


def read_length(text: str):
    """Return a draft_len given as text: the number, or the text itself for `longest_draft` to accept or reject."""
    return int(text) if text.isdecimal() and len(text) < 20 else text


def longest_draft(model, draft, draft_len) -> int:
    """Return the longest draft for a draft_len; ValueError if it is no valid length or the model cannot draft it."""
    longest = inf if draft is not None else getattr(model, 'longest_draft', 0)
    if draft_len != 'auto' and not (isinstance(draft_len, int) and 1 <= draft_len <= LONGEST):
        raise ValueError(f"draft_len is {draft_len!r}: expected 'auto' or a number of tokens from 1 to {LONGEST}")
    if longest < 1:
        raise ValueError(f'{type(model).__module__} cannot draft for itself as it was trained: give a second run that '
                         'drafts')
    if draft_len != 'auto' and draft_len > longest:
        raise ValueError(f'draft_len is {draft_len}: this model drafts up to {longest} tokens')
    if draft is not None:
        ours, theirs = ((m.config.n_ids, m.config.vocab_size) for m in (model, draft))
        if ours != theirs:
            raise ValueError(f'the draft model has {theirs[0]} ids in {theirs[1]} rows, the model {ours[0]} in '
                             f'{ours[1]}: they must share one vocabulary')
    return min(longest, LONGEST_AUTO) if draft_len == 'auto' else draft_len


class SpeculativeDecoder:
    """Decodes a draft and one more token per row and round.

    On a GPU, each step of a draft and each verification is a CUDA graph.
    """

    def __init__(self, model, cache, drafter, longest, filters, generator):
        self.model, self.cache, self.drafter, self.longest, self.filters = model, cache, drafter, longest, filters
        self.generator, self.is_greedy = generator, filters['temperature'] == 0
        self.graphs = {}

    def read_prompts(self, tokens, lengths):
        """Read the prompts (B, n), right-padded to lengths. Returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        check_logits(logits)
        B, V, device = *logits.shape, logits.device
        self.noise = torch.ones(B, V, device=device)
        self.uniform = torch.full((B, self.longest), 0.5, device=device)
        self.drafts = torch.zeros(B, self.longest, dtype=torch.int64, device=device)
        self.probs = torch.zeros(B, self.longest, V, device=device)  # the distribution of each drafted token
        self.confidences = torch.zeros(B, self.longest, device=device)  # its probability before the filters
        self.lengths, self.accepted = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.live = torch.ones_like(lengths, dtype=torch.bool)
        self.refresh(self.noise)
        self.token = self.pick(logits)[0]
        self.drafter.read_prompts(tokens, lengths, self.token)
        return self.token

    def refresh(self, noise, uniform=None):
        """Draw new random numbers, which greedy decoding does not need."""
        if not self.is_greedy:
            noise.exponential_(generator=self.generator)
            if uniform is not None:
                uniform.uniform_(generator=self.generator)

    def pick(self, logits):
        """Pick tokens (B,) from logits (B, V). Returns them and their distribution (B, V)."""
        probs = token_probs(logits, **self.filters)
        return draw(probs, self.noise), probs

    def draft(self, i):
        """Draft token i of the round; called with i = 0, 1, ... in turn."""
        self.refresh(self.noise)
        self.run(('draft', i), lambda: self.draft_step(i), lambda: None)

    def draft_step(self, i):
        def pick(logits):
            token, probs = self.pick(logits)
            confidence = logits.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1).exp()
            self.confidences[:, i] = confidence
            return token, probs
        before = self.token if i == 0 else self.drafts[:, i - 1]
        self.drafts[:, i], self.probs[:, i] = self.drafter.step(i, before, pick)

    def verify(self, n, lengths, live):
        """Verify the n drafted tokens, of which the first `lengths` (B,) count. Rows that are not live (B,) are kept.

        Afterwards `accepted` is the number of accepted tokens of `drafts`, and `token` the one that follows them.
        """
        self.lengths.copy_(lengths)
        self.live.copy_(live)
        self.refresh(self.noise, self.uniform)
        before = self.token.clone()

        def undo():
            self.cache.rollback(torch.where(self.live, self.accepted + 1, 0))
            self.token.copy_(before)
        self.run(('verify', n), lambda: self.verify_step(n), undo)
        self.drafter.end_round(n, self.drafts[:, :n], self.accepted, self.token, self.live)

    def verify_step(self, n):
        drafts = self.drafts[:, :n]
        tokens = torch.cat([self.token[:, None], drafts], 1)
        logits = self.model.extend(tokens, self.cache, self.lengths + 1, all_positions=True)
        p = token_probs(logits, **self.filters)
        accepted, token = verify(p, self.probs[:, :n], drafts, self.lengths, self.uniform[:, :n], self.noise)
        self.cache.rollback(torch.where(self.live, self.lengths - accepted, self.lengths + 1))
        self.accepted.copy_(accepted)
        self.token.copy_(token)

    def run(self, name, step, undo):
        """Run a step: on a GPU as a CUDA graph, captured the first time."""
        if not all(has_graphs(model, self.token.device) for model in (self.model, self.drafter.model)):
            return step()
        if name not in self.graphs:
            self.graphs[name] = record_graph(step, undo, beside=next(iter(self.graphs.values()), None))
        self.graphs[name].replay()


# ---- sources of drafts ----

class OwnDraft:
    """The model drafts for itself, through its `draft`."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def read_prompts(self, tokens, lengths, token):
        pass

    def step(self, i, token, pick):
        """Draw token i of the draft, which follows `token` (B,). Returns it (B,) and its distribution (B, V).

        Idempotent.
        """
        self.cache.drafted = i  # set here, because replaying a graph does not update it
        tokens, probs = self.model.draft(token, self.cache, 1, pick)
        return tokens[:, 0], probs[:, 0]

    def end_round(self, n, drafts, accepted, token, live):
        pass


class RunDraft:
    """Another model drafts, of any architecture.

    A cache can only roll back its last run, so each step reads the whole draft so far as one run. That costs little
    more than reading its last token.
    """

    def __init__(self, model, prompts, max_new_tokens, longest):
        self.model = decodable(model)
        self.cache = roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)

    def read_prompts(self, tokens, lengths, token):
        """Read the prompts; `token` (B,) follows them."""
        check_logits(self.model.extend(tokens, self.cache, lengths))
        self.new_run = torch.zeros(len(tokens), self.cache.max_run, dtype=torch.int64, device=tokens.device)
        self.new_run[:, 0] = token
        self.n_unread = torch.ones_like(lengths)  # tokens of the text, 1 or 2, that are not in the cache yet
        self.n_held = torch.zeros_like(lengths)  # tokens of new_run that are in the cache
        self.batch_idx = torch.arange(len(tokens), device=tokens.device)

    def step(self, i, token, pick):
        """See `OwnDraft.step`."""
        if i > 0:
            self.new_run[self.batch_idx, self.n_unread + i - 1] = token
        self.cache.rollback(self.n_held)
        width = i + (int(self.n_unread.max()) if token.device.type == 'cpu' else 2)
        self.n_held.copy_(self.n_unread + i)
        tokens = self.new_run[:, :min(width, self.new_run.shape[1])]
        return pick(self.model.extend(tokens, self.cache, self.n_held))

    def end_round(self, n, drafts, accepted, token, live):
        """End a round: forget the tokens of the drafts (B, n) after the first accepted (B,); `token` comes next.

        Rows that are not live are kept.
        """
        if n == 0:  # every row has its last token
            return
        self.cache.rollback(torch.where(live, n - 1 - accepted.clamp(max=n - 1), self.n_held))
        self.n_held.zero_()
        all_accepted = accepted == n  # then the last drafted token was never read
        first = torch.where(all_accepted, drafts[:, n - 1], token)
        self.new_run[:, 0] = torch.where(live, first, self.new_run[:, 0])
        self.new_run[:, 1] = torch.where(live, token, self.new_run[:, 1])
        self.n_unread.copy_(torch.where(live, 1 + all_accepted.long(), self.n_unread))  # in place: a graph reads it


# ---- draft lengths ----

class DraftStatistics:
    """Counts over all rows: `rounds`, `drafted` tokens, and by position in the draft, tokens `tried` and `accepted`.

    Each round also makes one token that was not drafted.
    """

    def __init__(self):
        self.tried, self.accepted, self.rounds, self.drafted = [], [], 0, 0

    def add(self, length: int, accepted: int) -> None:
        """Count one row's draft of `length` tokens, of which the first `accepted` were accepted."""
        self.rounds += 1
        self.drafted += length
        for counts, n in ((self.tried, min(length, accepted + 1)), (self.accepted, accepted)):
            counts += [0] * (length - len(counts))
            for i in range(n):
                counts[i] += 1

    @property
    def accepted_per_step(self) -> float:
        return sum(self.accepted) / max(1, self.rounds)

    @property
    def by_position(self) -> list[float]:
        """Acceptance rate at each position of a draft, given that all tokens before it were accepted."""
        return [a / t for a, t in zip(self.accepted, self.tried) if t]


class AutoLength:
    """Decides after each drafted token whether to draft another. It learns: reuse it for the next call.

    The unit of time is one verification. A round with n drafted tokens takes 1 + n cost and yields the accepted tokens
    and one more. `speed` is the number of tokens of all rounds so far over their time. One more drafted token takes
    `cost`, in which speed x cost tokens could be made otherwise. Its gain is the probability that it and the whole
    draft before it are accepted, averaged over the rows. It is drafted if its gain is more than speed x cost.

    The acceptance probability of a drafted token is estimated from earlier tokens of similar confidence (the draft
    model's probability for the token), and that of the next token from all earlier ones. The rows of a batch share a
    round's time, so they share its length: a row that stopped alone would save nothing.

    Whether a token is drafted depends only on the tokens before it, so the distribution of the text is unchanged. No
    clock is read: the same seed gives the same lengths and the same text.
    """

    BINS = 10  # of confidence

    def __init__(self, cost: float | None = None):
        """cost: time to draft one token; None: `draft_cost` of the first call."""
        self.cost = cost
        self.tokens = self.time = 1.0  # per row, over all rounds; starts at the speed of plain decoding
        self.bins = [[2 * (i + 0.5) / self.BINS, 2.0] for i in range(self.BINS)]  # accepted, tried: a prior

    def begin(self, n_rows: int) -> None:
        """Start a round."""
        self.drafts, self.survive = [], [1.0] * n_rows

    def more(self, confidences: list[float]) -> bool:
        """Return True to draft another token. confidences: of the token just drafted, in each unfinished row."""
        bins = [self.bins[min(int(c * self.BINS), self.BINS - 1)] for c in confidences]
        self.drafts.append(bins)
        self.survive = [before * accepted / tried for before, (accepted, tried) in zip(self.survive, bins)]
        accepted, tried = (sum(counts) for counts in zip(*self.bins))
        return sum(self.survive) * accepted / tried > len(bins) * self.cost * self.tokens / self.time

    def learn(self, outcomes: list[tuple[int, int]]) -> None:
        """End a round. outcomes: (length, accepted) of each row that was unfinished."""
        self.tokens += 1 + sum(accepted for _, accepted in outcomes) / len(outcomes)
        self.time += 1 + len(self.drafts) * self.cost
        for row, (length, accepted) in enumerate(outcomes):
            for i in range(min(length, accepted + 1)):
                counts = self.drafts[i][row]
                counts[0] += i < accepted
                counts[1] += 1


def draft_cost(model, draft, decoder) -> float:
    """Return the time to draft a token over the time of a verification: the ratio of the bytes that they read.

    The verification also has one more token to read, which costs a CPU 0.08 (measured on a Xeon: 0.07 with
    quickstart_nextlat, 0.11 with 8 layers of 192) and a GPU 0.01 (a guess).
    """
    if draft is not None:
        drafting = weight_bytes(draft.modules()) + decoder.drafter.cache.nbytes
    else:
        called = set()
        hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            decoder.draft_step(0)  # the round repeats it
        finally:
            hook.remove()
        drafting = weight_bytes(called)
    one_more = 0.08 if decoder.token.device.type == 'cpu' else 0.01
    return drafting / (weight_bytes(model.modules()) + decoder.cache.nbytes) + one_more


def weight_bytes(modules) -> int:
    """Return the bytes of the modules' weights, each counted once, without embedding tables, which are only indexed."""
    weights = {p for module in modules if not isinstance(module, nn.Embedding)
               for p in module.parameters(recurse=False)}
    return sum(p.nbytes for p in weights)
