"""Speculative decoding: `speculative_generate`.

A round drafts n tokens, appends the last token and the draft to the cache in one `extend`, keeps the tokens that
`verify` accepts, and draws one more. The text has the same distribution as with plain decoding, whatever the draft is.

Read `verify` first, then `speculative_generate`. `OwnDraft` and `RunDraft` make drafts.
"""
from math import inf

import torch

from common import decoding

# draft_len 'auto' stops where the product of the draft's own confidences falls below this value: the rule of EAGLE-2,
# and of Hugging Face for one token at a time. A confidence is the probability of the likeliest token, not of the one
# that was drawn: at temperature 1, the latter says little about acceptance.
AUTO_CONFIDENCE = 0.05
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
        return torch.zeros_like(lengths), decoding.draw(p[:, 0], noise)
    p_draft, q_draft = (x[:, :n].gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    counted = torch.arange(n, device=p.device) < lengths[:, None]
    accepted = (accepts(p_draft, q_draft, uniform) & counted).long().cumprod(1).sum(1)
    p_next = p[batch_idx, accepted]
    rest = (p_next - q[batch_idx, accepted.clamp(max=n - 1)]).clamp(min=0)
    is_rejected = (accepted < lengths) & (rest.sum(-1) > 0)  # rounding may leave no rest
    return accepted, decoding.draw(torch.where(is_rejected[:, None], rest, p_next), noise)


def accepts(p, q, uniform) -> torch.Tensor:
    """Return True where the drafted token is accepted: p, q are its target and draft probabilities."""
    return uniform * q < p


@torch.inference_mode()
@torch.autocast('cpu', enabled=False)  # see `generate`
def speculative_generate(model, prompts: list[list[int]], max_new_tokens: int, *, draft=None, draft_len='auto', seed=0,
                         eos_id=None, finished=None, **sampling) -> tuple[list[list[int]], 'DraftStatistics']:
    """`generate` with drafts: the same distribution of texts in fewer steps. Returns new ids and DraftStatistics.

    draft: a second model with the same vocabulary; None: the model drafts for itself. draft_len: tokens per draft, or
    'auto': see `draft_tokens`. Greedy texts equal those of `generate` except where rounding breaks a tie between two
    logits. Raises UserError like `generate`, and ValueError if the model cannot draft or cannot draft that many tokens.
    """
    longest = longest_draft(model, draft, draft_len)
    decoding.check_prompts(prompts)
    decoding.check_sampling(**sampling)
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # the graphs are captured there
    cache = decoding.roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)
    drafter = OwnDraft(model, cache) if draft is None else RunDraft(draft, prompts, max_new_tokens, longest)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = SpeculativeDecoder(decoding.decodable(model), cache, drafter, longest, sampling, generator)
    texts, statistics = decoding.NewTexts(len(prompts), max_new_tokens, eos_id, finished), DraftStatistics()
    for b, token in enumerate(decoder.read_prompts(*decoding.pad(prompts, device)).tolist()):
        texts.add(b, [token])
    while any(texts.live):
        room = [max_new_tokens - len(ids) - 1 if is_live else 0 for ids, is_live in zip(texts.new, texts.live)]
        most = longest if device.type == 'cuda' else min(longest, max(room))  # another length would be another graph
        live = torch.tensor(texts.live, device=device)
        n = draft_tokens(decoder, most, live, AUTO_CONFIDENCE if draft_len == 'auto' else 0)
        lengths = [min(n, tokens) for tokens in room]
        decoder.verify(n, torch.tensor(lengths, device=device), live)
        accepted, token, drafts = decoder.accepted.tolist(), decoder.token.tolist(), decoder.drafts.tolist()
        for b in [b for b, is_live in enumerate(texts.live) if is_live]:
            statistics.add(lengths[b], accepted[b])
            texts.add(b, drafts[b][:accepted[b]] + [token[b]])
    return texts.new, statistics


def draft_tokens(decoder, longest: int, live, least: float) -> int:
    """Draft up to `longest` tokens and return how many.

    A draft ends early where the product of its confidences, averaged over the live rows (B,) of the batch, falls below
    `least`. The rows share a round's time, so they share its length. The next token is drafted or not
    depending only on the tokens before it, so the distribution of the texts is unchanged.
    """
    for n in range(longest):
        decoder.draft(n)
        if least and decoder.confidences[live, :n + 1].prod(1).mean() < least:
            return n + 1
    return longest


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
    if draft is not None and draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(f'the draft model has {draft.config.vocab_size} rows of vocabulary, the model '
                         f'{model.config.vocab_size}: they must have the same number')
    return min(longest, LONGEST_AUTO) if draft_len == 'auto' else draft_len


def read_length(text: str) -> int | str:
    """Return a draft_len given as text; `longest_draft` says whether it is one."""
    return int(text) if text.isdecimal() else text


class SpeculativeDecoder:
    """Decodes a draft and one more token per row and round.

    On a GPU, each step of a draft and each verification is a CUDA graph.
    """

    def __init__(self, model, cache, drafter, longest, filters, generator):
        self.model, self.cache, self.drafter, self.longest, self.filters = model, cache, drafter, longest, filters
        self.generator, self.is_greedy = generator, filters.get('temperature') == 0
        self.graphs = {}

    def read_prompts(self, tokens, lengths):
        """Read the prompts (B, n), right-padded to lengths. Returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        decoding.check_logits(logits)
        B, V, device = *logits.shape, logits.device
        self.noise = torch.ones(B, V, device=device)
        self.uniform = torch.full((B, self.longest), 0.5, device=device)
        self.drafts = torch.zeros(B, self.longest, dtype=torch.int64, device=device)
        self.probs = torch.zeros(B, self.longest, V, device=device)  # the distribution of each drafted token
        self.confidences = torch.zeros(B, self.longest, device=device)  # greatest probability, before the filters
        self.lengths, self.accepted = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.live = torch.ones_like(lengths, dtype=torch.bool)
        self.refresh()
        self.token = self.pick(logits)[0]
        self.drafter.read_prompts(tokens, lengths, self.token)
        return self.token

    def refresh(self):
        """Draw new random numbers, which greedy decoding does not need."""
        if not self.is_greedy:
            self.noise.exponential_(generator=self.generator)
            self.uniform.uniform_(generator=self.generator)

    def pick(self, logits):
        """Pick tokens (B,) from logits (B, V). Returns them and their distribution (B, V)."""
        probs = decoding.token_probs(logits, **self.filters)
        return decoding.draw(probs, self.noise), probs

    def draft(self, i):
        """Draft token i of the round; called with i = 0, 1, ... in turn."""
        def pick(logits):
            token, probs = self.pick(logits)
            self.confidences[:, i] = logits.float().softmax(-1).amax(-1)
            return token, probs

        def step():
            before = self.token if i == 0 else self.drafts[:, i - 1]
            self.drafts[:, i], self.probs[:, i] = self.drafter.step(i, before, pick)
        self.refresh()
        self.run(('draft', i), step, lambda: None)

    def verify(self, n, lengths, live):
        """Verify the n drafted tokens, of which the first `lengths` (B,) count. Rows that are not live (B,) are kept.

        Afterwards `accepted` is the number of accepted tokens of `drafts`, and `token` the one that follows them.
        """
        self.lengths.copy_(lengths)
        self.live.copy_(live)
        before, drafts = self.token.clone(), self.drafts[:, :n]

        def step():
            tokens = torch.cat([self.token[:, None], drafts], 1)
            logits = self.model.extend(tokens, self.cache, self.lengths + 1, all_positions=True)
            p, q = decoding.token_probs(logits, **self.filters), self.probs[:, :n]
            accepted, token = verify(p, q, drafts, self.lengths, self.uniform[:, :n], self.noise)
            self.cache.rollback(torch.where(self.live, self.lengths - accepted, self.lengths + 1))
            self.accepted.copy_(accepted)
            self.token.copy_(token)

        def undo():
            self.cache.rollback(torch.where(self.live, self.accepted + 1, 0))
            self.token.copy_(before)
        self.refresh()
        self.run(('verify', n), step, undo)
        self.drafter.end_round(n, drafts, self.accepted, self.token, self.live)

    def run(self, name, step, undo):
        """Run a step: on a GPU as a CUDA graph, captured the first time."""
        if not all(decoding.has_graphs(model, self.token.device) for model in (self.model, self.drafter.model)):
            return step()
        if name not in self.graphs:
            self.graphs[name] = decoding.record_graph(step, undo, beside=next(iter(self.graphs.values()), None))
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
        self.model = decoding.decodable(model)
        self.cache = decoding.roomy_cache(model, prompts, max_new_tokens + longest + 2, longest + 1)

    def read_prompts(self, tokens, lengths, token):
        """Read the prompts; `token` (B,) follows them."""
        decoding.check_logits(self.model.extend(tokens, self.cache, lengths))
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
        return pick(self.model.extend(self.new_run[:, :width], self.cache, self.n_held))

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
