"""The Context-Ready Transformer ("The Context-Ready Transformer", arXiv 2606.27538) and its baselines.

A token does not enter the blocks as a raw embedding: a small network first adds a correction made from the block output of the
position before, which already holds the context. Left to right that is a recurrent network, one pass per token (Algorithm 1). In
training all positions run at once and the corrections are refined over K unrolls (eq. 5), each from scratch: the fixed point of
the unrolls is what streaming computes. K = 1 is the plain Transformer, which can be converted later.

Read `_correction` and `_blocks` (eq. 1 to 3), then `stream_reference` (Algorithm 1) and `_window` (eq. 5). `extend` is all of
decoding. `Scan` is exact backpropagation through time, with as few operators per position as we could. Linear layers and LayerNorms
have biases, but for the head: the paper does not say.

    B  batch        T  positions          C  width, n_embd          V  vocabulary rows, padded
    D  blocks, n_layer (in attention: head size)                    H  heads          K  unrolls
    e  a token's embedding          z  the block output, h^(D) in eq. 3, before the final norm
    correction^(k), z^(k)  after k unrolls, correction^(0) = 0; `first` marks a document's first token, before which z is 0
"""
import math
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
    rope_table,
    rotate,
    slot_attention,
    visible,
)
from scans.context_ready import Scan

VARIANTS = ('add', 'concat', 'token_blind', 'tied', 'block_head', 'extra_ffn')


@dataclass
class Config:
    n_layer: int = 5  # blocks, D
    n_head: int = 16  # attention heads, H
    n_embd: int = 1120  # width of the residual stream, C
    n_ffn: int | None = None  # inner width of the feed-forward nets; None: 4 n_embd
    variant: str = 'add'  # what the correction is made of: add, concat, token_blind, tied, block_head; extra_ffn: Roformer-hFFN, a control without
    K: int = 5  # unrolls of a training step, at most; 1: no correction, the plain Transformer (Roformer)
    k_min: int | None = None  # each step draws its unrolls from k_min ... K, uniformly; None: always K
    last_unrolls: int | None = None  # backpropagate through so many of the last unrolls only; None: through all
    bptt: bool = False  # train on the streaming pass itself, by exact backpropagation through all positions, instead of unrolls
    checkpoint_unrolls: bool = False  # keep only each unroll's result for the backward: memory of one unroll, a third more compute
    prefill: str = 'parallel'  # long runs of `extend`, and `logits`: unroll all positions until nothing changes, or run them one by one: sequential
    prefill_tol: float = 1e-6  # parallel prefill stops when no correction changes by this share of its size
    window: int | None = None  # positions of the past that a query sees besides its own; None: all
    dropout: float = 0.0  # on what enters the blocks and on their residual branches, fresh in every unroll
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the variance in LayerNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    vocab_size: int = 32000  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 32000  # real token ids; rows from here on are padding
    eos_id: int | None = None  # the id that ends a document: attention and corrections stop there; None, as in the paper: one endless document

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'rope_theta', 'norm_eps', 'init_std', 'prefill_tol'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.variant not in VARIANTS or self.prefill not in ('parallel', 'sequential'):
            raise ValueError(f'variant = {self.variant!r}, prefill = {self.prefill!r}: expected one of {", ".join(VARIANTS)}; parallel or sequential')
        if self.K < 1 or any(n is not None and not 1 <= n <= self.K for n in (self.k_min, self.last_unrolls)):
            raise ValueError(f'K = {self.K}, k_min = {self.k_min}, last_unrolls = {self.last_unrolls}: expected K of at least 1, the others '
                             'from 1 to K, or None for K')
        if self.variant == 'extra_ffn' and self.K > 1:
            raise ValueError(f'variant = extra_ffn and K = {self.K}: Roformer-hFFN has nothing to unroll, use K = 1')
        if self.bptt and self.K == 1:
            raise ValueError(f'bptt = True with K = 1 (variant = {self.variant!r}): without a correction nothing runs from position to position. '
                             'Use K > 1, which builds the network')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None for 4 n_embd')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout}: expected 0 or more and less than 1')
        if self.window is not None and self.window < 0:
            raise ValueError(f'window = {self.window}: expected 0 or more positions, or None for all')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: n_embd / n_head must be an even whole number')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        self.n_ffn = self.n_ffn or 4 * self.n_embd


class FFN(nn.Module):
    """LayerNorm, Linear, GELU, Linear: a feed-forward branch with its norm. x (..., n_in) -> (..., n_out)."""

    def __init__(self, n_in, n_ffn, n_out, eps):
        super().__init__()
        self.norm = nn.LayerNorm(n_in, eps)
        self.up = nn.Linear(n_in, n_ffn)
        self.down = nn.Linear(n_ffn, n_out)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """LayerNorm, rotary causal attention and its output projection: a residual branch."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.norm = nn.LayerNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def forward(self, h, rope, attend):
        """h (B, T, C) -> (B, T, C). attend(q, k, v) attends over this window or over a cache; rope None: it rotates too."""
        B, T, C = h.shape
        qkv = self.qkv(self.norm(h)).view(B, T, 3 * self.n_head, C // self.n_head)
        qk, v = qkv.tensor_split([2 * self.n_head], 2)
        q, k = (qk if rope is None else rotate(qk, *rope)).chunk(2, 2)
        return self.out(attend(q, k, v).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.attn = Attention(config)
        self.ffn = FFN(config.n_embd, config.n_ffn, config.n_embd, config.norm_eps)

    def forward(self, h, rope, attend):
        """A layer of eq. 3. h (B, T, C) -> (B, T, C)."""
        h = h + F.dropout(self.attn(h, rope, attend), self.dropout, self.training)
        return h + F.dropout(self.ffn(h), self.dropout, self.training)


class Cache:
    """Keys and values of up to max_tokens tokens a row, in static shapes, and z of the last few. Slot s of a row holds its token s.

    One spare slot at the end takes what right-padding writes past the last real slot, and is never read. z of position p is in
    row p % (max_run + 2): after the last run is forgotten, the z before it is still there.
    """

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype, z_dtype):
        self.max_tokens, self.max_run = max_tokens, max_run
        head_size = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, max_tokens + 1, head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.z = torch.zeros(batch_size, max_run + 2 if config.K > 1 else 0, config.n_embd, device=device, dtype=z_dtype)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = torch.zeros(batch_size, max_tokens + 2, device=device, dtype=torch.int64)  # of the token in each slot
        self.hidden = torch.zeros(batch_size, max_run, config.n_embd, device=device, dtype=dtype)  # last run, before the head
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), head_size, config.rope_theta)
        self.unrolls = None  # that the last parallel prefill took

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (self.k, self.v, self.z, self.lengths, self.doc_start, self.hidden, *self.rope))

    def rollback(self, n):
        """Forgets the last n tokens of the last run: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        C = c.n_embd
        self.embed = nn.Embedding(c.vocab_size, C)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        if c.variant == 'extra_ffn':
            self.extra = FFN(C, c.n_ffn, C, c.norm_eps)
        elif c.K > 1 and c.variant == 'block_head':
            self.correction = nn.LayerNorm(C, c.norm_eps)
        elif c.K > 1:
            self.correction = FFN(2 * C if c.variant == 'concat' else C, c.n_ffn, C, c.norm_eps)
            if c.variant == 'tied':  # a norm of its own, the weights of the last block
                self.correction.up, self.correction.down = self.blocks[-1].ffn.up, self.blocks[-1].ffn.down
        self.norm = nn.LayerNorm(C, c.norm_eps)
        self.head = nn.Linear(C, c.vocab_size, bias=False)
        self.unrolls = c.K  # of this training step
        self._graphs = {}  # of the scan, on a GPU, by shape
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                scale = (2 * c.n_layer) ** -0.5 if name.endswith('attn.out.weight') else 1.0
                nn.init.normal_(p, std=c.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    @property
    def sequential(self):
        """Whether a short run of `extend` takes a pass per token, so that verifying a draft saves no time."""
        return self.config.K > 1

    def begin_step(self, rng):
        """Draws the unrolls of the next training step from rng, a random.Random that is equal on all processes (section 3.2)."""
        self.unrolls = rng.randint(self.config.k_min or self.config.K, self.config.K)

    def adopt(self, tensors):
        """Named weights of a K = 1 run with a new correction network beside them, whose last layer is 0: the same function.

        Weights that have a correction already, or are for a model without one, come back as they are. Raises ValueError for
        variants without a last layer of their own.
        """
        own = {name: p.detach() for name, p in self.named_parameters() if name.startswith('correction.')}
        if not own or any(name in tensors for name in own):
            return tensors
        if self.config.variant not in ('add', 'concat', 'token_blind'):
            raise ValueError(f'a K = 1 run cannot be converted to variant = {self.config.variant!r}, which has no layer that could start at 0: '
                             'use add, concat or token_blind')
        return tensors | {name: torch.zeros_like(p) if name.startswith('correction.down') else p for name, p in own.items()}

    # ---- eq. 1 to 4 ----

    def _correction(self, z, e, first):
        """Eq. 1. e (B, n, C); z (B, n, C) of the position before each, 0 where `first` (B, n). Returns (B, n, C)."""
        z = z.masked_fill(first.unsqueeze(-1), 0)
        if self.config.variant == 'concat':
            return self.correction(torch.cat([z, e], -1))
        return self.correction(z if self.config.variant in ('token_blind', 'block_head') else z + e)

    def _blocks(self, x, rope, attend):
        """Eq. 3: what enters (eq. 2) -> z, both (B, n, C). attend(layer, q, k, v) is the attention of a layer."""
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, lambda q, k, v, layer=layer: attend(layer, q, k, v))
        return x

    def _final(self, z):
        """What the head reads (eq. 4). z (B, n, C) -> (B, n, C)."""
        return self.norm(z + self.extra(z) if self.config.variant == 'extra_ffn' else z)

    # ---- whole windows ----

    def _start(self, idx):
        """Of windows idx (B, T): e (B, T, C), first (B, T), rope, attend."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        position = torch.arange(idx.shape[1], device=idx.device)
        first = (position == (0 if doc_start is None else doc_start)).expand_as(idx)
        rope = rope_table(position, c.n_embd // c.n_head, c.rope_theta)
        return self.embed(idx), first, rope, lambda layer, q, k, v: attention(q, k, v, doc_start, c.window)

    def _unroll(self, e, z, first, rope, attend):
        """z^(k) from z^(k-1) (eq. 5), which is None for k = 1."""
        x = e if z is None else e + self._correction(z.roll(1, 1), e, first)  # `first` hides what the roll brings to position 0
        return self._blocks(x, rope, attend)

    def _forgotten_unroll(self, *args):
        """`_unroll`, computed again in the backward. A function of its own, as a compiler does not see a `checkpoint` outside of one."""
        return checkpoint(self._unroll, *args, use_reentrant=False)

    @torch.compiler.disable(recursive=False)  # one unroll is compiled, for any K
    def _window(self, idx):
        """z of whole windows as training sees them: after this step's unrolls, or streamed. idx (B, T) -> (B, T, C)."""
        c = self.config
        if c.bptt:
            return self.stream(idx)
        e, first, rope, attend = self._start(idx)
        K, z = self.unrolls if self.training else c.K, None
        for k in range(K):
            with torch.set_grad_enabled(torch.is_grad_enabled() and k >= K - (c.last_unrolls or K)):
                unroll = self._forgotten_unroll if c.checkpoint_unrolls and self.training else self._unroll
                z = unroll(e, z, first, rope, attend)
        if K == 1 < c.K:  # every process must have gradients of all weights
            z = z + 0 * sum(p.sum() for p in self.correction.parameters())
        return z

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats a counted token after the last unroll (section 3.2).

        With documents on, positions whose input is eos do not count. In training the unrolls are those that `begin_step` drew.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        loss = self.nll(self._window(idx), targets)
        return {'loss': loss, 'nll': loss.detach()}

    def nll(self, z, targets):
        """Mean nats of targets (B, T), -1 ignored, given block outputs z (B, T, C)."""
        return linear_cross_entropy(self._final(z).flatten(0, 1), self.head.weight, targets.flatten())

    def _unrolls(self, e, first, before, rope, attend):
        """Yields (z^(k), correction^(k)) for k = 1, 2, ... (eq. 5), without end. before (B, 1, C): z of the position before e."""
        correction = torch.zeros_like(e)
        while True:
            z = self._blocks(e + correction, rope, attend)
            correction = self._correction(torch.cat([before.to(z.dtype), z[:, :-1]], 1), e, first)
            yield z, correction

    def _fixed_point(self, e, first, before, counts, rope, attend):
        """Unrolls until no correction that `counts` (B, n) changes by prefill_tol of its size, or only rounding changes them, or all
        are exact (Lemma 1). Returns z (B, n, C) and the number of unrolls."""
        device = e.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.head.weight.dtype
        rounding = 16 * torch.finfo(dtype).eps
        last, last_change = torch.zeros_like(e), math.inf
        for k, (z, correction) in enumerate(self._unrolls(e, first, before, rope, attend), 1):
            change = ((correction - last).norm(dim=-1) / correction.norm(dim=-1).clamp(min=1e-30))[counts].max().item()
            if k > e.shape[1] or change < self.config.prefill_tol or last_change <= change < rounding:
                return z, k
            last, last_change = correction, change

    def unrolled(self, idx):
        """Yields (z^(k), correction^(k)), each (B, T, C), for k = 1, 2, ... of whole windows idx (B, T), without end."""
        e, first, rope, attend = self._start(idx)
        yield from self._unrolls(e, first, torch.zeros_like(e[:, :1]), rope, attend)

    def logits(self, idx):
        """Next-token logits at every position, as streaming gives them. idx (B, T) -> (B, T, V); -inf for ids that only pad."""
        B, T = idx.shape
        return self.extend(idx, self.new_cache(B, T, device=idx.device), all_positions=True)

    def _logits(self, h):
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    # ---- exact backpropagation through time ----

    def stream_reference(self, idx):
        """Algorithm 1 as it stands, one position after another. idx (B, T) -> z (B, T, C), differentiable."""
        c, T = self.config, idx.shape[1]
        e, first, (cos, sin), _ = self._start(idx)
        position, doc_start = torch.arange(T, device=idx.device), document_starts(idx, c.eos_id)
        past = [None] * c.n_layer  # keys and values of each layer, (B, H, w + 1, D)
        zs, z = [], torch.zeros_like(e[:, :1])
        for t in range(T):
            now, seen = slice(t, t + 1), slice(0 if c.window is None else max(0, t - c.window), t + 1)
            mask = visible(position[now], position[seen], None if doc_start is None else doc_start[:, now]).expand(len(idx), 1, -1)

            def attend(layer, q, k, v):
                new = k.transpose(1, 2), v.transpose(1, 2)
                if t > 0:
                    new = [torch.cat([old, x], 2)[:, :, seen.start - seen.stop:] for old, x in zip(past[layer], new)]
                past[layer] = new
                return slot_attention(q, *new, mask)

            z = self._blocks(e[:, now] + self._correction(z, e[:, now], first[:, now]), (cos[now], sin[now]), attend)
            zs.append(z)
        return torch.cat(zs, 1)

    @torch.compiler.disable
    def stream(self, idx):
        """`stream_reference` by `Scan`, in the dtype of the weights. idx (B, T) -> z (B, T, C).

        In training on a GPU forward and backward are one CUDA graph each: run the backward before the next forward.
        """
        c, p = self.config, self.config.dropout if self.training else 0.0
        e, first, rope, _ = self._start(idx)
        B, T, C = e.shape
        dropout = None
        if p:
            dropout = torch.empty(1 + 2 * c.n_layer, T, B, C, device=e.device, dtype=e.dtype).bernoulli_(1 - p).div_(1 - p)
        doc_start = document_starts(idx, c.eos_id)
        given = [x for x in (e, *rope, doc_start, dropout) if x is not None]  # a graph's inputs are tensors
        params = self._scanned()

        def scan(e, cos, sin, *rest):
            rest = list(rest)
            starts, factors = (None if x is None else rest.pop(0) for x in (doc_start, dropout))
            return Scan.apply(self, e, starts, factors, (cos, sin), *rest)

        with torch.autocast(e.device.type, enabled=False):
            if not (e.is_cuda and torch.is_grad_enabled()):
                return scan(*given, *params)
            key = e.shape, dropout is None
            if key not in self._graphs:
                own = [x.detach().clone().requires_grad_() for x in (e, *params)]
                self._graphs[key] = torch.cuda.make_graphed_callables(scan, (own[0], *given[1:], *own[1:]))
            # the next replay overwrites the graph's gradients, which p.grad would take as they are: `p * 1` has them copied
            return self._graphs[key](*given, *(p * 1 for p in params))

    def _scanned(self):
        """The parameters that `Scan` gives gradients."""
        return list(dict.fromkeys([*self.blocks.parameters(), *self.correction.parameters()]))  # `tied` has some twice

    # ---- decoding ----

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows of up to max_tokens tokens; runs of up to max_run tokens have static shapes."""
        weight = self.embed.weight
        return Cache(self.config, batch_size, max_tokens, max_run, device or weight.device, dtype or weight.dtype, weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a speculative run are this one call. Runs of n <= cache.max_run are streamed
        (Algorithm 1), have static shapes and never wait for the device; longer ones go as `prefill` says. Raises ValueError if a
        row has no room left; in a run of n <= max_run on a GPU, keeping within max_tokens is the caller's part.
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
        first = positions == (0 if doc_start is None else doc_start)
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        last = lambda m: (run[:, None] - m).clamp(min=0) + torch.arange(min(n, m), device=tokens.device)  # of each row's tokens
        e = self.embed(tokens)
        if c.K == 1:
            z = self._blocks(e, *self._cached(cache, positions, doc_start, n > cache.max_run))
        else:
            kept, kept_z = last(cache.max_run + 1), cache.z.shape[1]
            z = cache.z[rows, (cache.lengths[:, None] - 1) % kept_z]  # of the token before
            if n > cache.max_run and c.prefill == 'parallel':
                counts = torch.arange(n, device=tokens.device) < run[:, None]
                z, cache.unrolls = self._fixed_point(e, first, z, counts, *self._cached(cache, positions, doc_start, True))
            else:
                steps = []
                for now in (slice(t, t + 1) for t in range(n)):
                    at = self._cached(cache, positions[:, now], None if doc_start is None else doc_start[:, now])
                    z = self._blocks(e[:, now] + self._correction(z, e[:, now], first[:, now]), *at)
                    steps.append(z)
                z = torch.cat(steps, 1)
            cache.z[rows, positions[rows, kept] % kept_z] = z[rows, kept].to(cache.z.dtype)
        h, kept = self._final(z), last(cache.max_run)
        cache.hidden[:, :kept.shape[1]] = h[rows, kept]
        cache.lengths += run
        return self._logits(h) if all_positions else self._logits(h[rows[:, 0], run - 1])

    def _cached(self, cache, positions, doc_start, may_be_first=False):
        """rope and attend of a run at positions (B, n): its keys and values go to the cache, and it attends to what is there."""
        c, rows = self.config, torch.arange(len(positions), device=positions.device)[:, None]
        alone = may_be_first and not cache.lengths.any()  # the cache is empty: these tokens see only each other
        fused = not may_be_first and decodes(cache.k, positions.shape[1])

        def attend(layer, q, k, v):
            if fused:
                q, k, v, slots = (x.unsqueeze(1) for x in (q, k, v, positions))
                return decode_attention(q, k, v, cache.k[layer], cache.v[layer], cache.rope, positions, slots, doc_start,
                                        [c.window, None], reads='memory').squeeze(1)
            cache.k[layer, rows, :, positions] = k.to(cache.k.dtype)
            cache.v[layer, rows, :, positions] = v.to(cache.v.dtype)
            if alone:
                return attention(q, k, v, doc_start, c.window)
            return cached_attention(q, cache.k[layer], cache.v[layer], positions, doc_start, c.window)

        return None if fused else tuple(table[positions] for table in cache.rope), attend

    def _extend_documents(self, tokens, cache, rows, positions):
        """Where each new token's document starts (B, n); the cache learns it for the slot after each of them."""
        ends = tokens == self.config.eos_id
        first = cache.doc_start[rows, cache.lengths[:, None]]
        later = torch.where(ends[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[rows, positions + 1] = torch.where(ends, positions + 1, doc_start)
        return doc_start

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T, over the mean number of unrolls: 6 a weight used (2 forward, 4 backward;
        2 in unrolls without a backward), and attention's pairs."""
        c = self.config
        keys = (T + 1) / 2  # mean over the window's queries
        if c.window is not None and c.window < T - 1:
            w = c.window + 1
            keys = w - w * (w - 1) / 2 / T
        depths = [1] if c.bptt else range(c.k_min or c.K, c.K + 1)
        graded = [min(K, c.last_unrolls or K) for K in depths]  # unrolls with a backward
        passes = sum(2 * K + 4 * n for K, n in zip(depths, graded)) / len(depths)
        weights = lambda module: sum(p.numel() for p in module.parameters() if p.dim() >= 2)
        blocks = weights(self.blocks) + 2 * c.n_layer * c.n_embd * keys + (weights(self.extra) if c.variant == 'extra_ffn' else 0)
        flops = 6 * self.head.weight.numel() + passes * blocks
        if c.K > 1:  # the first unroll has no correction
            flops += weights(self.correction) * (6 if c.bptt else sum(2 * K - 2 + 4 * min(n, K - 1) for K, n in zip(depths, graded)) / len(depths))
        return flops
