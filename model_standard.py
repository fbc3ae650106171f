"""The standard Transformer: the baseline of all four papers ("The State-Prediction Separation Hypothesis", appendix A).

One stream of vectors, one per token, does two jobs: it predicts the next token, and it is the memory that later tokens read.
Pre-normalised blocks of rotary causal attention and a SwiGLU feed-forward net, no biases, weight-tied output head.

Read `Block.forward`, then `Model._hidden`, which training, prefill and decoding share. `extend` is all of decoding.

    B  batch        T  positions          C  width, n_embd (d in the paper)     V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 3 C            n  positions of one `extend` call
    h  a token's vector, x its id
"""
from dataclasses import dataclass

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
    rms_norm,
    rope_table,
    rotate,
)


@dataclass
class Config:
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (SPS paper, section 4)
    window: int | None = None  # positions of the past that a query sees besides its own; None: all
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    eos_id: int | None = 50256  # the id that ends a document: attention stops there; None: one endless document

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'rope_theta', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.window is not None and self.window < 0:
            raise ValueError(f'window = {self.window}: expected 0 or more positions, or None for all')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None for 3 n_embd')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: n_embd / n_head must be an even whole number')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        self.n_ffn = self.n_ffn or 3 * self.n_embd


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
        qkv = self.qkv(self.attn_norm(h)).view(B, T, 3 * self.n_head, C // self.n_head)  # eq. 7
        qk, v = qkv.tensor_split([2 * self.n_head], 2)
        q, k = (qk if rope is None else rotate(qk, *rope)).chunk(2, 2)
        h = h + self.attn_out(attend(q, k, v).reshape(B, T, C))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Cache:
    """Keys and values of up to max_tokens tokens a row, in static shapes. Slot s of a row holds its token s.

    One spare slot at the end takes what right-padding writes past the last real slot, and is never read.
    """

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype):
        self.max_tokens, self.max_run = max_tokens, max_run
        head_size = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, max_tokens + 1, head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = torch.zeros(batch_size, max_tokens + 2, device=device, dtype=torch.int64)  # of the token in each slot
        self.hidden = torch.zeros(batch_size, max_run, config.n_embd, device=device, dtype=dtype)  # last run, before the head
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), head_size, config.rope_theta)

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (self.k, self.v, self.lengths, self.doc_start, self.hidden, *self.rope))

    def rollback(self, n):
        """Forgets the last n tokens of the last run: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as the official SPS code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)

    def _hidden(self, idx, rope, attend):
        """idx (B, T) -> the final normalised vectors (B, T, C). attend(layer, q, k, v) is the attention of a layer."""
        h = self.embed(idx)
        for layer, block in enumerate(self.blocks):
            here = lambda q, k, v, layer=layer: attend(layer, q, k, v)
            if self.config.checkpoint_blocks and self.training:
                h = checkpoint(block, h, rope, here, use_reentrant=False)
            else:
                h = block(h, rope, here)
        return self.norm(h)

    def _window(self, idx):
        """The final vectors of whole windows, each attended within itself. idx (B, T) -> (B, T, C)."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        rope = rope_table(torch.arange(idx.shape[1], device=idx.device), c.n_embd // c.n_head, c.rope_theta)
        return self._hidden(idx, rope, lambda layer, q, k, v: attention(q, k, v, doc_start, c.window))

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats a counted token.

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self._window(idx)
        loss = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self._window(idx))

    def _logits(self, h):
        logits = self.head(h)  # eq. 10, before the softmax
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
                                        [c.window, None], reads='memory').squeeze(1)
            cache.k[layer, rows, :, positions] = k.to(cache.k.dtype)
            cache.v[layer, rows, :, positions] = v.to(cache.v.dtype)
            if first:
                return attention(q, k, v, doc_start, c.window)
            return cached_attention(q, cache.k[layer], cache.v[layer], positions, doc_start, c.window)

        h = self._hidden(tokens, rope, attend)
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        cache.lengths += run
        kept = (run[:, None] - cache.max_run).clamp(min=0) + torch.arange(min(n, cache.max_run), device=tokens.device)
        cache.hidden[:, :kept.shape[1]] = h[rows, kept]
        return self._logits(h) if all_positions else self._logits(h[rows[:, 0], run - 1])

    def _extend_documents(self, tokens, cache, rows, positions):
        """Where each new token's document starts (B, n); the cache learns it for the slot after each of them."""
        ends = tokens == self.config.eos_id
        first = cache.doc_start[rows, cache.lengths[:, None]]
        later = torch.where(ends[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[rows, positions + 1] = torch.where(ends, positions + 1, doc_start)
        return doc_start

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: 6 a weight used (2 forward, 4 backward), and attention's pairs."""
        c = self.config
        keys = (T + 1) / 2  # mean over the window's queries
        if c.window is not None and c.window < T - 1:
            w = c.window + 1
            keys = w - w * (w - 1) / 2 / T
        weights = sum(p.numel() for name, p in self.blocks.named_parameters() if p.dim() >= 2) + self.head.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_embd * keys
