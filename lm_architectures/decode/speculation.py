"""Speculative decoding: `speculative_generate`.

Each round drafts n tokens, feeds the last token and the draft to the model in one `extend`, keeps
the tokens that `verify` accepts, and samples one more. The text has the same distribution as plain
decoding, whatever the draft.

Read `verify` first, then `speculative_steps`. Drafts come from `SelfDrafter` or `ModelDrafter`.
"""
from collections.abc import Iterator
from math import inf
from typing import Literal

import torch

from lm_architectures.decode import generation
from lm_architectures.files import UserError

# draft_len 'auto' stops when the product of confidences falls below this value, as in EAGLE-2 and,
# for single tokens, Hugging Face. The confidence is the probability of the most likely token: that
# of the sampled one says little about acceptance at temperature 1.
AUTO_CONFIDENCE = 0.02
MAX_AUTO_DRAFT = 16  # maximum draft with draft_len 'auto'
MAX_DRAFT = 1000  # maximum of any draft_len
DraftLen = int | Literal['auto']


def verify(p, q, drafts, lengths, uniform, noise) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2022). Returns accepted counts and next tokens (B,).

    p (B, n + 1, V): the model's distributions. q (B, n, V): those that drafts (B, n) were sampled
    from; only the first lengths (B,) tokens count. Token x is accepted with probability min(1, p(x)
    / q(x)). The first rejected token is replaced by a sample from max(p - q, 0), normalized; if all
    are accepted, one more is sampled from p. uniform (B, n) in [0, 1). noise (B, V): see `draw`.
    """
    batch_idx, n = torch.arange(len(p), device=p.device), drafts.shape[1]
    if n == 0:
        return torch.zeros_like(lengths), generation.draw(p[:, 0], noise)
    p_draft, q_draft = (x[:, :n].gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    counted = torch.arange(n, device=p.device) < lengths[:, None]
    accepted = (accepts(p_draft, q_draft, uniform) & counted).long().cumprod(1).sum(1)
    p_next = p[batch_idx, accepted]
    rest = (p_next - q[batch_idx, accepted.clamp(max=n - 1)]).clamp(min=0)
    is_rejected = (accepted < lengths) & (rest.sum(-1) > 0)  # the sum may round to 0
    return accepted, generation.draw(torch.where(is_rejected[:, None], rest, p_next), noise)


def accepts(p, q, uniform) -> torch.Tensor:
    """Return True where the drafted token is accepted: p, q are target and draft probabilities."""
    return uniform * q < p


@torch.autocast('cpu', enabled=False)  # see `generate`
def speculative_generate(model, prompts: list[list[int]], max_new_tokens: int,
                         **options) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """`generate` with drafts: same distribution, fewer steps. Returns the new ids, and `rounds`.

    rounds, options: see `speculative_steps`.
    """
    rounds = []
    *_, new = speculative_steps(model, prompts, max_new_tokens, rounds, **options)
    return new, rounds


@torch.inference_mode()
def speculative_steps(model, prompts: list[list[int]], max_new_tokens: int, rounds: list[tuple[int, int]], *,
                      draft=None, draft_len='auto', seed=0, eos_id=None, finished=None,
                      **sampling) -> Iterator[list[list[int]]]:
    """`generation_steps` with drafts. Yields the new ids so far, after each round.

    rounds: gets (drafted tokens, accepted ones) of each row and round, which also generates one
    more token. draft: a second model with the same vocabulary; None: the model drafts for itself.
    draft_len: tokens per draft, or 'auto' (see `draft_tokens`). Greedy texts equal those of
    `generate` unless rounding breaks a tie between two logits. Raises UserError like
    `generation_steps` and `longest_draft`.
    """
    longest = longest_draft(model, draft, draft_len)
    decoder = SpeculativeDecoder(model, draft, prompts, max_new_tokens, longest, seed, sampling)
    texts = generation.GeneratedTexts(len(prompts), max_new_tokens, eos_id, finished)
    for b, token in enumerate(decoder.tokens.tolist()):
        texts.add(b, [token])
    device = decoder.tokens.device
    yield texts.new
    while any(texts.live):
        room = [max_new_tokens - len(ids) - 1 if is_live else 0 for ids, is_live in zip(texts.new, texts.live)]
        most = longest if device.type == 'cuda' else min(longest, max(room))  # the same length reuses one CUDA graph
        live = torch.tensor(texts.live, device=device)
        n = draft_tokens(decoder, most, live, AUTO_CONFIDENCE if draft_len == 'auto' else 0)
        lengths = [min(n, n_left) for n_left in room]
        decoder.verify_draft(n, torch.tensor(lengths, device=device), live)
        accepted, tokens, drafts = decoder.accepted.tolist(), decoder.tokens.tolist(), decoder.drafts.tolist()
        for b, is_live in enumerate(texts.live):
            if is_live:
                rounds.append((lengths[b], accepted[b]))
                texts.add(b, drafts[b][:accepted[b]] + [tokens[b]])
        yield texts.new


def draft_tokens(decoder, longest: int, live, least: float) -> int:
    """Draft up to `longest` tokens and return how many.

    Stops when the product of confidences, averaged over the live rows (B,), falls below `least`:
    rows share a round, so they share its length. Whether to draft a token depends only on the
    tokens before it, so the distribution of the texts is unchanged.
    """
    for n in range(longest):
        decoder.draft(n)
        if least and decoder.confidences[live, :n + 1].prod(1).mean() < least:
            return n + 1
    return longest


def longest_draft(model, draft, draft_len: DraftLen) -> int:
    """Return the maximum draft for a draft_len. UserError if invalid or too long for the model."""
    if draft_len != 'auto' and not (isinstance(draft_len, int) and 1 <= draft_len <= MAX_DRAFT):
        raise UserError(f"draft_len is {draft_len!r}: expected 'auto' or 1 to {MAX_DRAFT} tokens")
    if draft is not None and draft.config.vocab_size != model.config.vocab_size:
        raise UserError(f'the draft model has vocab_size {draft.config.vocab_size}, but the model has '
                        f'{model.config.vocab_size}: use a draft model with the same vocabulary')
    most = inf if draft is not None else getattr(model, 'longest_draft', 0)
    if most < 1:
        raise UserError(f'{type(model).__module__.rpartition(".")[2]} cannot draft for itself: give a draft model, '
                        '--draft=RUN')
    longest = min(most, MAX_AUTO_DRAFT) if draft_len == 'auto' else draft_len
    if longest > most:
        raise UserError(f'draft_len is {draft_len}: this model can draft at most {most} tokens')
    return longest


class SpeculativeDecoder(generation.Decoder):
    """Decode a draft and one more token per row and round. `tokens` (B,) are the last ones.

    On a GPU, each draft step and each verification is a CUDA graph.
    """

    def __init__(self, model, draft, prompts, max_new_tokens: int, longest: int, seed: int, filters: dict):
        """Prefill the prompts. longest: maximum draft length. Others: as in `speculative_steps`."""
        n_slots = max_new_tokens + longest + 2  # per row of a cache, after the prompt
        cache = generation.allocate_cache(model, prompts, n_slots, longest + 1)
        super().__init__(model, prompts, cache, seed, filters)
        self.drafter = SelfDrafter(model, cache) if draft is None else ModelDrafter(draft, prompts, n_slots, longest)
        self.models += [self.drafter.model]
        (B, V), device = self.noise.shape, self.noise.device
        self.uniform = torch.full((B, longest), 0.5, device=device)
        self.drafts = torch.zeros(B, longest, dtype=torch.int64, device=device)
        self.probs = torch.zeros(B, longest, V, device=device)  # distribution of each drafted token
        self.confidences = torch.zeros(B, longest, device=device)  # maximum probability, before the filters
        self.lengths, self.accepted = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)
        self.live = torch.ones_like(self.tokens, dtype=torch.bool)

    def run(self, name, step):
        """Run a step with new random numbers. On a GPU, as a CUDA graph."""
        self.refresh_noise()
        if not self.is_greedy:
            self.uniform.uniform_(generator=self.generator)
        super().run(name, step)

    def draft(self, i):
        """Draft token i of the round. Call with i = 0, 1, ... in order."""
        def pick(logits):
            self.confidences[:, i] = logits.float().softmax(-1).amax(-1)
            probs = generation.token_probs(logits, **self.filters)
            return generation.draw(probs, self.noise), probs

        def step():
            before = self.tokens if i == 0 else self.drafts[:, i - 1]
            self.drafts[:, i], self.probs[:, i] = self.drafter.step(i, before, pick)
        self.run(('draft', i), step)

    def verify_draft(self, n, lengths, live):
        """Set `accepted`, how many tokens of `drafts` are, and `tokens`, those after them: (B,).

        Of n drafted tokens, the first `lengths` (B,) count. Rows that are not `live` (B,) are kept.
        """
        self.lengths.copy_(lengths)
        self.live.copy_(live)
        drafts = self.drafts[:, :n]

        def step():
            tokens = torch.cat([self.tokens[:, None], drafts], 1)
            logits = self.model.extend(tokens, self.cache, self.lengths + 1, all_positions=True)
            p, q = generation.token_probs(logits, **self.filters), self.probs[:, :n]
            accepted, tokens = verify(p, q, drafts, self.lengths, self.uniform[:, :n], self.noise)
            self.cache.rollback(torch.where(self.live, self.lengths - accepted, self.lengths + 1))
            self.accepted.copy_(accepted)
            self.tokens.copy_(tokens)
        self.run(('verify', n), step)
        self.drafter.end_round(n, drafts, self.accepted, self.live)


# ---- sources of drafts ----

class SelfDrafter:
    """Drafts from the model itself, through its `draft`."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def step(self, i, token, pick):
        """Draft token i, after `token` (B,). Returns it (B,) and its distribution (B, V)."""
        self.cache.drafted = i  # replayed CUDA graphs do not advance it
        tokens, probs = self.model.draft(token, self.cache, 1, pick)
        return tokens[:, 0], probs[:, 0]

    def end_round(self, n, drafts, accepted, live):
        """Do nothing: verification has rolled back the shared cache."""


class ModelDrafter:
    """Drafts from another model, of any architecture.

    A cache can only roll back its last call, so each step feeds the whole draft so far in one call.
    This costs little more than feeding its last token.
    """

    def __init__(self, model, prompts, n_slots, longest):
        self.model, device = generation.decodable(model), next(model.parameters()).device
        self.cache = generation.allocate_cache(model, prompts, n_slots, longest + 1)
        tokens, lengths = generation.pad(prompts, device)
        generation.check_logits(self.model.extend(tokens, self.cache, lengths))
        self.to_feed = torch.zeros(len(prompts), longest + 1, dtype=torch.int64, device=device)
        self.n_unread = torch.ones_like(lengths)  # 1 or 2 text tokens that are not in the cache yet
        self.n_held = torch.zeros_like(lengths)  # tokens of to_feed already in the cache
        self.batch_idx = torch.arange(len(prompts), device=device)

    def step(self, i, token, pick):
        """See `SelfDrafter.step`."""
        self.to_feed[self.batch_idx, self.n_unread + i - 1] = token
        self.cache.rollback(self.n_held)
        width = i + (int(self.n_unread.max()) if token.device.type == 'cpu' else 2)
        self.n_held.copy_(self.n_unread + i)
        return pick(self.model.extend(self.to_feed[:, :width], self.cache, self.n_held))

    def end_round(self, n, drafts, accepted, live):
        """Roll back to the first accepted (B,) of the drafts (B, n); fully in rows not live."""
        if n == 0:  # every text is at its last token
            return
        self.cache.rollback(torch.where(live, n - 1 - accepted.clamp(max=n - 1), self.n_held))
        self.n_held.zero_()
        self.to_feed[:, 0] = drafts[:, n - 1]  # unread if all were accepted, else overwritten by the next step
        self.n_unread.copy_(1 + (accepted == n).long())  # in place, for CUDA graphs


def acceptance(model, data, block_size: int, n_prompts: int, seed: int) -> float:
    """Return the fraction of accepted drafts of up to 5 tokens, on halves of validation windows."""
    T = block_size // 2
    prompts = data.val_batch(range(min(n_prompts, data.n_rows('val', T))), T)[0].tolist()
    drafted, accepted = zip(*speculative_generate(model, prompts, block_size - T, draft_len=min(5, model.longest_draft),
                                                  seed=seed)[1])
    return sum(accepted) / max(1, sum(drafted))
