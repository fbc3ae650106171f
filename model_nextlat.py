"""NextLat ("Next-Latent Prediction Transformers Learn Compact World Models"), with its baselines MTP and JTP.

A Transformer whose final vector h_t is to be a belief state: besides the next token it is trained so that a small network p_psi can
tell the next vector h_{t+1} from h_t and the token x_{t+1}. The Transformer itself is unchanged. As p_psi can be applied to its own
result, the model drafts tokens for itself, as many as one likes, without running the Transformer (`draft`).

One `objective` says what is trained beside the next token:

    ntp      nothing: the baseline
    nextlat  h_{t+i} and its softmax from h_t and x_{t+1} ... x_{t+i}, by p_psi applied i times
    mtp      x_{t+1+i} from h_t alone, by a Transformer layer of its own for each i (Gloeckle et al. 2024)
    jtp      x_{t+1+i} from h_t and x_{t+1} ... x_{t+i}, by one self-attention over these, Fetch (Ahn et al. 2025)

Read `Model.forward`, then `draft`; `_hidden` is what training, prefill and decoding share, `extend` is all of decoding.

    B  batch        T  positions          C  width, n_embd               V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   n  positions of one `extend` call, tokens of a draft
    h  the final normalised vector, before the head, of a token x        d  horizon: i = 1 ... d
"""
from dataclasses import dataclass
from math import inf

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (
    attention,
    cached_attention,
    decode_attention,
    decodes,
    document_starts,
    linear_cross_entropy,
    linear_cross_entropy_kl,
    rms_norm,
    rope_table,
    rotate,
)


@dataclass
class Config:
    objective: str = 'nextlat'  # ntp, nextlat, mtp or jtp
    horizon: int = 1  # d: positions ahead that are trained beside the next token
    lambda_h: float = 1.0  # weight of the next hidden state's Smooth L1 loss in nextlat; 0: without it
    lambda_kl: float = 1.0  # weight of the KL loss in nextlat; 0: without it
    lambda_mtp: float = 1.0  # weight of the further tokens in mtp and jtp
    n_dynamics: int | None = None  # width of p_psi's two hidden layers; None: 3 n_embd (paper: 6528 at 2048)
    token_loss: str = 'kl'  # kl, or ce: p_psi's softmax learns from the token itself instead (appendix, ablations)
    stop_target: bool = True  # no gradient into the hidden state that is to be predicted; False: appendix, ablations
    stop_head: bool = True  # no gradient into the head from p_psi's softmax; False: appendix, ablations
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd, up to a multiple of 128 (from the paper's parameter counts)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = False  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    eos_id: int | None = 50256  # the id that ends a document: attention and all losses stop there; None: one endless document

    def __post_init__(self):
        for name, choices in (('objective', ('ntp', 'nextlat', 'mtp', 'jtp')), ('token_loss', ('kl', 'ce'))):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} = {getattr(self, name)!r}: expected {", ".join(choices)}')
        for name in ('n_layer', 'n_head', 'n_embd', 'rope_theta', 'norm_eps', 'init_std', 'horizon', 'lambda_mtp'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        for name in ('n_ffn', 'n_dynamics'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at least 1, or None')
        if min(self.lambda_h, self.lambda_kl) < 0 or not self.lambda_h + self.lambda_kl > 0:
            raise ValueError(f"lambda_h = {self.lambda_h} and lambda_kl = {self.lambda_kl}: expected 0 or more, not both 0; "
                             "for neither loss use objective = 'ntp'")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: n_embd / n_head must be an even whole number')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128
        self.n_dynamics = self.n_dynamics or 3 * self.n_embd


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, n_ffn = config.n_embd, config.n_ffn
        self.n_head = config.n_head
        self.attn_norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.ffn_norm = RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)

    def forward(self, h, rope, attend):
        """h (B, T, C) -> (B, T, C). attend(q, k, v) is the attention, over this window or over a cache; rope None: it rotates too."""
        B, T, C = h.shape
        qkv = self.qkv(self.attn_norm(h)).view(B, T, 3 * self.n_head, C // self.n_head)
        qk, v = qkv.tensor_split([2 * self.n_head], 2)
        q, k = (qk if rope is None else rotate(qk, *rope)).chunk(2, 2)
        h = h + self.attn_out(attend(q, k, v).reshape(B, T, C))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Dynamics(nn.Module):
    """p_psi: h^_{t+1} = h_t + f(LayerNorm([h_t, emb(x_{t+1})])), f three linear layers with GELU (appendix, "More details")."""

    def __init__(self, config):
        super().__init__()
        C, width = config.n_embd, config.n_dynamics
        self.norm = nn.LayerNorm(2 * C, bias=False)
        self.fc1 = nn.Linear(2 * C, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.fc3 = nn.Linear(width, C, bias=False)

    def forward(self, h, e):
        """h (..., C), e (..., C), the embedding of the token after it -> (..., C)."""
        x = self.norm(torch.cat([h, e], -1))
        return h + self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Fetch(nn.Module):
    """JTP's head: causal self-attention over h_t, emb(x_{t+1}), ..., emb(x_{t+i}), read at the last of them."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.out_norm = RMSNorm(C, config.norm_eps)

    def project(self, x, rope):
        """x (B, T, C) -> q, k, v (B, T, H, D), q and k rotated: only differences of positions matter, so any start will do."""
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        return rotate(q, *rope), rotate(k, *rope), v

    def forward(self, e, q, keys, values):
        """e (B, T, C), the last elements, and their queries; keys, values: i + 1 of (B, T, H, D) -> what the head reads (B, T, C)."""
        scores = torch.stack([(q * k).sum(-1) for k in keys], -1) * q.shape[-1] ** -0.5
        shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
        mixed = sum(share.unsqueeze(-1) * v for share, v in zip(shares.unbind(-1), values))
        return self.out_norm(e + self.attn_out(mixed.flatten(2)))


class Cache:
    """Keys and values of up to max_tokens tokens a row, in static shapes. Slot s of a row holds its token s.

    One spare slot at the end takes what right-padding writes past the last real slot, and is never read. MTP's further heads are
    layers like the others; they are filled, and run, only in a cache for runs of several tokens, as plain decoding needs none.
    """

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype):
        self.max_tokens, self.max_run = max_tokens, max_run
        C, head_size = config.n_embd, config.n_embd // config.n_head
        future_heads = config.horizon if config.objective == 'mtp' and max_run > 1 else 0
        shape = (config.n_layer + future_heads, batch_size, config.n_head, max_tokens + 1, head_size)
        zeros = lambda *shape, dtype=dtype: torch.zeros(shape, device=device, dtype=dtype)
        self.k, self.v = zeros(*shape), zeros(*shape)
        self.lengths = zeros(batch_size, dtype=torch.int64)  # tokens held by each row
        self.doc_start = zeros(batch_size, max_tokens + 2, dtype=torch.int64)  # of the token in each slot
        self.hidden = zeros(batch_size, max_run, C)  # last run, before the head
        self.last = zeros(batch_size, dtype=torch.int64)  # which of the last run is the row's last token
        self.drafted = 0  # tokens drafted since the last run
        self.states = zeros(batch_size, max_run, C)  # nextlat: h^_{t+i} of the tokens drafted since then
        self.future = zeros(batch_size, max_run, future_heads, C)  # mtp: the further heads' vectors of the last run
        n_fetched = config.horizon + 1 if config.objective == 'jtp' else 0
        self.fetched = zeros(2, n_fetched, batch_size, 1, config.n_head, head_size)  # jtp: Fetch's keys and values
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), head_size, config.rope_theta)

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (self.k, self.v, self.lengths, self.doc_start, self.hidden, self.last, self.states, self.future,
                                      self.fetched, *self.rope))

    def rollback(self, n):
        """Forgets the last n tokens of the last run: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n
        self.last -= n


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.objective == 'nextlat':
            self.dynamics = Dynamics(config)
        elif config.objective == 'mtp':  # the trunk is all blocks but the last, which is the next token's head
            self.future = nn.ModuleList(Block(config) for _ in range(config.horizon))
        elif config.objective == 'jtp':
            self.fetch = Fetch(config)
        if config.tied_head:
            self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as model_standard
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)

    @property
    def longest_draft(self):
        """How many tokens `draft` can draft after one; 0: none."""
        return {'ntp': 0, 'nextlat': inf}.get(self.config.objective, self.config.horizon)

    def _hidden(self, idx, rope, attend):
        """idx (B, T) -> the final normalised vectors (B, T, C), and what enters the last block. attend(layer, q, k, v): attention."""
        h = self.embed(idx)
        for layer, block in enumerate(self.blocks):
            trunk = h
            here = lambda q, k, v, layer=layer: attend(layer, q, k, v)
            if self.config.checkpoint_blocks and self.training:
                h = checkpoint(block, h, rope, here, use_reentrant=False)
            else:
                h = block(h, rope, here)
        return self.norm(h), trunk

    def _window(self, idx):
        """The final vectors of whole windows, each attended within itself. idx (B, T) -> (B, T, C)."""
        return self._window_and_more(idx)[0]

    def _window_and_more(self, idx):
        """`_window`, what enters the last block, the rotary table, the documents' starts and the attention of any layer."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        rope = rope_table(torch.arange(idx.shape[1], device=idx.device), c.n_embd // c.n_head, c.rope_theta)
        attend = lambda q, k, v: attention(q, k, v, doc_start)
        return *self._hidden(idx, rope, lambda layer, q, k, v: attend(q, k, v)), rope, doc_start, attend

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll', ...}: nats a counted token; the loss adds the other parts,
        'next_hidden' and 'kl' (or 'ce') of nextlat, 'further_tokens' of mtp and jtp, times their lambdas.

        With documents on, positions whose input is eos do not count: what follows them is another document. A guess made i
        positions before s counts if both are in one document; on a prompt (target -1 at s) only its Smooth L1 does.
        Each part is the mean over i of a mean over positions. Raises ValueError for a window that is not longer than the horizon.
        """
        c, T = self.config, idx.shape[1]
        self._check_window(T)
        if c.eos_id is not None:
            targets = targets.masked_fill(idx == c.eos_id, -1)
        h, trunk, rope, doc_start, attend = self._window_and_more(idx)
        position = torch.arange(T, device=idx.device)
        ahead = range(1, c.horizon + 1)
        same = [(position >= i).expand_as(idx) if doc_start is None else (position >= i) & (doc_start <= position - i) for i in ahead]
        further = [targets.masked_fill(~mask, -1) for mask in same]  # what i positions before is to predict at s
        if c.objective == 'nextlat':
            return self._next_latent(idx, targets, h, torch.stack(same), further)
        nll = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        if c.objective == 'ntp':
            return {'loss': nll, 'nll': nll.detach()}
        if c.objective == 'mtp':  # f_i(trunk_t) predicts x_{t+1+i}; recomputed in the backward, so memory hardly grows with d
            guess = lambda block, i: self.norm(block(trunk, rope, attend))[:, :T - i]
            guesses = [checkpoint(guess, block, i, use_reentrant=False) for i, block in zip(ahead, self.future)]
        else:
            guesses = self._fetched(idx, h, rope)
        part = self._mean_over_horizons(guesses, [x[:, i:] for i, x in zip(ahead, further)], self.head.weight)
        return {'loss': nll + c.lambda_mtp * part, 'nll': nll.detach(), 'further_tokens': part.detach()}

    def _check_window(self, T):
        if self.config.objective != 'ntp' and T <= self.config.horizon:
            raise ValueError(f'horizon = {self.config.horizon} does not fit windows of {T} tokens: expected a horizon shorter than the window')

    def _mean_over_horizons(self, guesses, targets, weight):
        """Mean over i of the mean negative log-likelihood of targets[i] (B, T_i) under softmax(guesses[i] weight^T)."""
        shares = [(x >= 0) / (len(targets) * (x >= 0).sum().clamp(min=1)) for x in targets]
        rows = lambda parts: torch.cat([part.flatten(0, 1) for part in parts])
        return linear_cross_entropy(rows(guesses), weight, rows(targets), row_weights=rows(shares))

    def _next_latent(self, idx, targets, h, same, further):
        """The three losses of nextlat. same (d, B, T): does the guess of position s made i before count. The paper's algorithm 1."""
        c, guess, e, guesses = self.config, h, self.embed(idx), []
        for _ in range(c.horizon):  # h^_{t+i} = p_psi(h^_{t+i-1}, x_{t+i}); the i first of a window stand for nothing
            if c.checkpoint_blocks and self.training:
                guess = checkpoint(self.dynamics, guess[:, :-1], e[:, 1:], use_reentrant=False)
            else:
                guess = self.dynamics(guess[:, :-1], e[:, 1:])
            guess = F.pad(guess, (0, 0, 1, 0))
            guesses.append(guess)
        parts = {}
        if c.lambda_kl and c.token_loss == 'kl':  # KL(p(.|sg h_s) || p(.|h^_s)), beside the next token's loss, which has the same logits
            counts = (same & (targets >= 0)).flatten(1)
            nll, kl = linear_cross_entropy_kl(torch.stack([h, *guesses]).flatten(1, 2), self.head.weight, targets.flatten(), counts, c.stop_head)
            parts['kl'] = c.lambda_kl, kl
        else:
            nll = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
            if c.lambda_kl:
                weight = self.head.weight.detach() if c.stop_head else self.head.weight
                parts['ce'] = c.lambda_kl, self._mean_over_horizons(guesses, further, weight)
        if c.lambda_h:
            goal = h.detach() if c.stop_target else h
            errors = [F.smooth_l1_loss(guess, goal, reduction='none').mean(-1) for guess in guesses]  # (B, T)
            means = [(error * mask).sum() / mask.sum().clamp(min=1) for error, mask in zip(errors, same)]
            parts['next_hidden'] = c.lambda_h, sum(means) / c.horizon
        loss = nll + sum(weight * part for weight, part in parts.values())
        return {'loss': loss, 'nll': nll.detach()} | {name: part.detach() for name, (_, part) in parts.items()}

    def _fetched(self, idx, h, rope):
        """What Fetch(h_t, x_{t+1} ... x_{t+i}) gives the head for i = 1 ... d: each (B, T - i, C), the i-th from t = 0 on."""
        T, e = idx.shape[1], self.embed(idx)
        _, k_h, v_h = self.fetch.project(h, rope)
        q, k, v = self.fetch.project(e, rope)

        def at(i):
            seen = lambda first, then: [first[:, :T - i], *(then[:, j:T - i + j] for j in range(1, i + 1))]
            return self.fetch(e[:, i:], q[:, i:], seen(k_h, k), seen(v_h, v))
        return [checkpoint(at, i, use_reentrant=False) for i in range(1, self.config.horizon + 1)]

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self._window(idx))

    def _logits(self, h):
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows of up to max_tokens tokens; runs of up to max_run tokens have static shapes."""
        weight = self.embed.weight
        return Cache(self.config, batch_size, max_tokens, max_run, device or weight.device, dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a speculative run are this one call. Runs of n <= cache.max_run have static
        shapes and never wait for the device. Raises ValueError if a row has no room left; in a run of n <= max_run on a GPU,
        where looking would mean waiting, keeping within max_tokens is the caller's part.
        """
        B, n = tokens.shape
        if tokens.device.type == 'cpu' or n > cache.max_run:
            longest = int((cache.lengths + (n if lengths is None else lengths)).max())
            if longest > cache.max_tokens:
                raise ValueError(f'a row of {longest} tokens does not fit a cache of max_tokens = {cache.max_tokens}')
        c, rows = self.config, torch.arange(B, device=tokens.device)[:, None]
        positions = cache.lengths[:, None] + torch.arange(n, device=tokens.device)
        positions = positions.clamp(max=cache.max_tokens)  # padding past the end goes to the spare slot
        doc_start = self._extend_documents(tokens, cache, rows, positions) if c.eos_id is not None else None
        first = n > cache.max_run and not cache.lengths.any()  # the cache is empty: these tokens see only each other
        fused = n <= cache.max_run and decodes(cache.k, n)
        rope = None if fused else tuple(table[positions] for table in cache.rope)

        def attend(layer, q, k, v):
            if fused:
                q, k, v, slots = (x.unsqueeze(1) for x in (q, k, v, positions))
                return decode_attention(q, k, v, cache.k[layer], cache.v[layer], cache.rope, positions, slots, doc_start,
                                        [None, None], reads='memory').squeeze(1)
            cache.k[layer, rows, :, positions] = k.to(cache.k.dtype)
            cache.v[layer, rows, :, positions] = v.to(cache.v.dtype)
            if first:
                return attention(q, k, v, doc_start)
            return cached_attention(q, cache.k[layer], cache.v[layer], positions, doc_start)

        h, trunk = self._hidden(tokens, rope, attend)
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        cache.lengths += run
        kept = (run[:, None] - cache.max_run).clamp(min=0) + torch.arange(min(n, cache.max_run), device=tokens.device)
        cache.hidden[:, :kept.shape[1]] = h[rows, kept]
        for i in range(cache.future.shape[2]):
            future = self.future[i](trunk, rope, lambda q, k, v: attend(c.n_layer + i, q, k, v))
            cache.future[:, :kept.shape[1], i] = self.norm(future)[rows, kept]
        cache.last.copy_(run.clamp(max=cache.max_run) - 1)
        cache.drafted = 0
        return self._logits(h) if all_positions else self._logits(h[rows[:, 0], run - 1])

    def _extend_documents(self, tokens, cache, rows, positions):
        """Where each new token's document starts (B, n); the cache learns it for the slot after each of them."""
        ends = tokens == self.config.eos_id
        first = cache.doc_start[rows, cache.lengths[:, None]]
        later = torch.where(ends[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[rows, positions + 1] = torch.where(ends, positions + 1, doc_start)
        return doc_start

    @torch.no_grad()
    def draft(self, token, cache, n, pick):
        """Drafts n tokens after token (B,), the one after those in the cache: tokens (B, n), and what they are from, probs (B, n, V).

        pick(logits (B, V)) -> token (B,), probs (B, V) chooses. The Transformer does not run and the cache's tokens stay as they are.
        Called again with the last drafted token, it goes on from there, until the next `extend`. Each row must have kept a
        token of the last run. Raises ValueError for more than `longest_draft` or cache.max_run tokens.
        """
        longest = min(self.longest_draft, cache.max_run)
        if cache.drafted + n > longest:
            raise ValueError(f"a draft of {cache.drafted + n} tokens: objective = '{self.config.objective}' with horizon = "
                             f'{self.config.horizon} and max_run = {cache.max_run} drafts up to {longest}')
        tokens, probs = [], []
        for _ in range(n):
            token, prob = pick(self._logits(self._drafted(token, cache)))
            cache.drafted += 1
            tokens.append(token)
            probs.append(prob)
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def _drafted(self, token, cache):
        """The vector (B, C) that stands for the one after token (B,), which follows what is in the cache and drafted."""
        c, i, e = self.config, cache.drafted, self.embed(token)
        rows = torch.arange(len(token), device=token.device)
        h = cache.hidden[rows, cache.last].to(e.dtype)
        if c.objective == 'mtp':
            if not cache.future.shape[2]:
                raise ValueError('drafting needs a cache with max_run of at least 2')
            return cache.future[rows, cache.last, i].to(e.dtype)
        if c.objective == 'nextlat':
            cache.states[:, i] = h = self.dynamics(h if i == 0 else cache.states[:, i - 1].to(e.dtype), e)
            return h
        rope = lambda p: rope_table(torch.arange(p, p + 1, device=token.device), c.n_embd // c.n_head, c.rope_theta)
        if i == 0:
            cache.fetched[:, 0] = torch.stack(self.fetch.project(h.unsqueeze(1), rope(0))[1:])
        q, k, v = self.fetch.project(e.unsqueeze(1), rope(i + 1))
        cache.fetched[:, i + 1] = torch.stack([k, v])
        keys, values = cache.fetched[:, :i + 2].to(e.dtype)
        return self.fetch(e.unsqueeze(1), q, keys, values).squeeze(1)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: 6 a weight used (2 forward, 4 backward), and attention's pairs.

        A weight that is used for each i counts d times; the KL loss takes 4 a weight of the head, which learns nothing from it.
        """
        c = self.config
        if T > 1:  # 1 asks for the weights alone
            self._check_window(T)
        matrices = lambda module: sum(p.numel() for p in module.parameters() if p.dim() >= 2)
        head, used, layers = self.head.weight.numel(), matrices(self.blocks) + self.head.weight.numel(), c.n_layer
        flops = 0
        if c.objective == 'nextlat':
            used += c.horizon * matrices(self.dynamics)
            flops = (4 if c.stop_head else 6) * c.horizon * head if c.lambda_kl else 0
        elif c.objective == 'mtp':
            used, layers = used + matrices(self.future) + c.horizon * head, layers + c.horizon
        elif c.objective == 'jtp':
            used += matrices(self.fetch) + 2 * c.n_embd ** 2 + (c.horizon - 1) * c.n_embd ** 2 + c.horizon * head
        return 6 * used + flops + 12 * layers * c.n_embd * (T + 1) / 2
