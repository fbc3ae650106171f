"""The Context-Ready Transformer (arXiv 2606.27538) and its baselines.

Token embeddings enter a Transformer without any context. Here a small network first corrects them,
given the block output of the previous position, which knows the context. The blocks are unchanged.

    correction_t = corr_ffn(LN(z_{t-1} + e_t))        eq. 1  `Correction`
    x~_t = e_t + correction_t                         eq. 2  `Model.step`
    z_t = blocks(x~_t; keys and values of the past)   eq. 3  `Model.step`, `Block.forward`
    logits_t = W_head LN_f(z_t)                       eq. 4  `Model.head_input`, `Model._logits`

Token t needs z_{t-1}. So there are two ways to compute a sequence, and both call `Model.step`:

    streaming   token by token, like a recurrent network (algorithm 1): `extend`, `stream` for bptt
    unrolls     K passes over all positions at once. Pass k reads z_{t-1} of pass k - 1 (eq. 5,
                `unroll`). The first has no correction, so K = 1 is the plain Transformer

T + 1 unrolls equal streaming (Lemma 1). If the correction is a contraction, far fewer come close
(theorem 3). Training and validation run K unrolls, `logits` unrolls until z stops changing.

    B  batch size   T  positions   C  width, n_embd   V  vocabulary, padded   n  positions of a call
    L  blocks, n_layer (the paper's D, or N if plain)  H  heads of size D, HK for keys and values
    K  unrolls      e  embeddings  z  block outputs before the final norm, the paper's h^(D)
    starts  True at a document's first token, whose z_{t-1} is 0 (z_{-1} in section 3.1, z_0 in 3.2)
"""
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (CrossEntropy, KVCache, Mask, attention, check_shape, checkpointed, chunked_loss,
                          counted_targets, dense_mask, document_starts, make_mask, mask_padding, mean_keys,
                          n_matrix_weights, outside_graphs, rope_table, rotate, sequence)


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'segment_len', 'checkpoint_unrolls'  # settings that only affect speed and memory
    defining = 'window',  # decides what the weights compute: --init_from refuses a model without it, unless it is None
    state_window = 'window'  # setting that limits how much of the state is seen, for analyses

    n_layer: int = 5  # blocks, L
    n_head: int = 16  # attention heads, H
    n_embd: int = 1120  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 4 n_embd (llama: 3). corr_ffn: F, but with llama 4 n_embd
    block: Literal['gpt', 'llama'] = 'gpt'  # gpt: LayerNorm, GELU, biases; llama: RMSNorm, SwiGLU, no biases
    tied_head: bool = False  # the output head shares the embedding's weights
    variant: Literal['add', 'concat', 'token_blind', 'tied', 'block_head', 'extra_ffn'] = 'add'  # see `Correction`
    K: int = 5  # unrolls in training (the most, with k_min) and validation; 1: the plain Transformer, Roformer
    k_min: int | None = None  # draw each step's number of unrolls uniformly from k_min ... K (paper: 2); None: always K
    checkpoint_unrolls: bool = False  # activation checkpointing per unroll: less memory, a third more compute
    bptt: bool = False  # train by streaming, with backpropagation through all positions, instead of by unrolls
    segment_len: int = 32  # bptt only: positions recomputed at a time in the backward pass
    prefill_tol: float = 1e-6  # prompts are unrolled until every z changes by less than this, relative to its norm
    window: int | None = None  # past positions that a query sees, [t - W, t] in appendix A.4; None: all
    dropout: float = 0.0  # on x~ and the blocks' branches (inferred), redrawn in each unroll (section 3.2); paper: 0.2
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-5  # epsilon of LayerNorm and RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    vocab_size: int = 32000  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 32000  # number of token ids; rows from n_ids on are padding
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax
    eos_id: int | None = None  # end-of-document id: attention and corrections do not cross it; None: one document
    # For pretrained models (docs/pretrained.md). All but rope_scaling need block = 'llama':
    n_kv_head: int | None = None  # key and value heads, HK; each serves H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases on queries, keys and values, as in Qwen2
    qk_norm: bool = False  # RMSNorm on each head's query and key, before RoPE, as in Qwen3
    rope_scaling: tuple[float, ...] | None = None  # Llama 3's RoPE scaling: factor, low, high, tokens (8,1,4,8192)

    def __post_init__(self):
        check_shape(self, K=1, k_min=1, segment_len=1, window=0, prefill_tol=0)  # sets head_size and n_kv_head
        self.n_ffn = self.n_ffn or (4 if self.block == 'gpt' else 3) * self.n_embd
        is_plain = (self.n_kv_head, self.n_head * self.head_size) == (self.n_head, self.n_embd)
        if self.block == 'gpt' and (self.qkv_bias or self.qk_norm or not is_plain):
            raise ValueError("n_kv_head, head_size, qkv_bias and qk_norm are settings of block = 'llama'")
        if self.block == 'llama' and self.variant in ('tied', 'extra_ffn'):
            raise ValueError(f"variant = {self.variant!r} needs block = 'gpt'")
        if self.variant == 'extra_ffn' and self.K > 1:
            raise ValueError(f'variant = extra_ffn with K = {self.K}: it has nothing to unroll, so set K = 1')
        if self.bptt and (self.K == 1 or self.checkpoint_unrolls):
            raise ValueError('bptt = True needs a correction (K > 1) and has no unrolls (checkpoint_unrolls = False)')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout}: expected at least 0, and less than 1')


class FFN(nn.Module):
    """Feed-forward branch: LayerNorm, Linear, GELU, Linear. x: (..., n_in) -> (..., n_out)."""

    def __init__(self, n_in, n_ffn, n_out, eps):
        super().__init__()
        self.norm = nn.LayerNorm(n_in, eps)
        self.up = nn.Linear(n_in, n_ffn)
        self.down = nn.Linear(n_ffn, n_out)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Correction(nn.Module):
    """Eq. 1 and its variants (section 5.8): setting, correction, and name in tables A2 and A3.

        add          corr_ffn(LN(z + e))   corr_ffn_add, eq. 1
        concat       corr_ffn(LN([z, e]))  corr_ffn_concat
        token_blind  corr_ffn(LN(z))       corr_ffn (token-blind)
        tied         corr_ffn(LN(z + e))   corr_ffn is that of a block (inferred: the last)
        block_head   LN(z)                 block_head: "the block's own residual" (inferred: z, LN)
        extra_ffn    none                  Roformer-hFFN: another FFN after the blocks (inferred)

    z is z_{t-1}. corr_ffn: Linear, GELU, Linear; C (concat: 2C) -> n_ffn (llama: 4C) -> C.
    """

    def __init__(self, c):
        super().__init__()
        self.variant, C = c.variant, c.n_embd
        n_in, n_inner = 2 * C if c.variant == 'concat' else C, c.n_ffn if c.block == 'gpt' else 4 * C
        self.norm = nn.LayerNorm(n_in, c.norm_eps)
        if c.variant != 'block_head':
            self.up = nn.Linear(n_in, n_inner)
            self.down = nn.Linear(n_inner, C)

    def forward(self, z, e, starts):
        """Return the corrections of e. z, e: (B, n, C) -> (B, n, C); starts: (B, n)."""
        x = z.masked_fill(starts.unsqueeze(-1), 0)
        if self.variant in ('add', 'tied'):
            x = x + e
        elif self.variant == 'concat':
            x = torch.cat([x, e], -1)
        x = self.norm(x)
        return x if self.variant == 'block_head' else self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_size, self.dropout = layer, config.head_size, config.dropout
        self.n_heads = [config.n_head, config.n_kv_head, config.n_kv_head]  # of queries, keys and values
        self.make_layers(config, config.n_embd)

    def make_layers(self, c, C):  # `LlamaBlock` overrides this and `ffn`
        self.attn_norm = nn.LayerNorm(C, c.norm_eps)
        self.qkv = nn.Linear(C, 3 * C)
        self.q_norm = self.k_norm = nn.Identity()
        self.attn_out = nn.Linear(C, C)
        self.ffn = FFN(C, c.n_ffn, C, c.norm_eps)

    def forward(self, h, rope, mask, cache=None):
        """Eq. 3. h: (B, n, C) -> (B, n, C); rope: cos, sin; cache: has `append`."""
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_size)).split(self.n_heads, 2)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + F.dropout(self.attn_out(attention(q, k, v, mask).flatten(2)), self.dropout, self.training)  # a^(i)
        return h + F.dropout(self.ffn(h), self.dropout, self.training)  # h^(i)


class LlamaBlock(Block):
    """The layers of model_standard.py, for converting pretrained Llama models (section 5.7)."""

    def make_layers(self, c, C):
        self.attn_norm = nn.RMSNorm(C, c.norm_eps)
        self.qkv = nn.Linear(C, (c.n_head + 2 * c.n_kv_head) * c.head_size, bias=c.qkv_bias)
        self.q_norm = nn.RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else nn.Identity()
        self.attn_out = nn.Linear(c.n_head * c.head_size, C, bias=False)
        self.ffn_norm = nn.RMSNorm(C, c.norm_eps)
        self.gate_up = nn.Linear(C, 2 * c.n_ffn, bias=False)
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)

    def ffn(self, h):  # in place of the module in `Block`
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return self.ffn_out(F.silu(gate) * up)


class Past(dict):
    """Keys and values of past positions, by layer: a growing cache that gradients flow through."""

    def append(self, layer, k, v):  # of the next position; returns all, as `KVCache.append`
        past_k, past_v = self.get(layer, (k[:, :0], v[:, :0]))
        self[layer] = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        return self[layer]


def expected_change(changes, k):
    """Return the change expected in unroll k if changes, in unrolls 2, 3, ..., shrink as so far."""
    factor = min(1, changes[-1] / changes[0]) ** (1 / (len(changes) - 1))  # mean, from one change to the next
    return changes[0] * factor ** (k - 2)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, c, C = config, config, config.n_embd
        make_block, make_norm = (Block, nn.LayerNorm) if c.block == 'gpt' else (LlamaBlock, nn.RMSNorm)
        self.reach = 2 ** 30 if c.window is None else c.window  # past positions that a query sees
        self.embed = nn.Embedding(c.vocab_size, C)
        self.blocks = nn.ModuleList(make_block(c, layer) for layer in range(c.n_layer))
        if c.variant == 'extra_ffn':
            self.extra = FFN(C, c.n_ffn, C, c.norm_eps)
        elif c.K > 1:
            self.correction = Correction(c)
            if c.variant == 'tied':  # its own norm, but the linear layers of the last block's FFN
                self.correction.up, self.correction.down = self.blocks[-1].ffn.up, self.blocks[-1].ffn.down
        self.norm = make_norm(C, c.norm_eps)
        self.head = nn.Linear(C, c.vocab_size, bias=False)  # inferred: all other layers have biases
        if c.tied_head:
            self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(c.vocab_size, None if c.pad_rows_in_loss else c.n_ids)
        self.K_choices = range(min(c.k_min or c.K, c.K), c.K + 1)  # `begin_step` draws from these
        self.drawn = SimpleNamespace(n_unrolls=c.K)  # an object: if a number of the model changes, masks are remade
        self.checkpoints = c.checkpoint_unrolls  # read by `@checkpointed` on `step`
        self.sequential = c.K > 1  # short `extend` calls run token by token, so verifying drafts saves no time
        self.shard_blocks = not c.bptt and c.variant != 'tied'  # bptt: a gather per token; tied: used outside the block
        # Initializes every matrix and bias: set other initial values after this loop.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # only the attention output is scaled down with depth (inferred)
                scale = (2 * c.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=c.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def sees(self, q, k):
        """Return True where query q attends to key k. Used in training and in decoding."""
        return (k.pos <= q.pos) & (q.pos - k.pos <= self.reach) & (k.pos >= q.doc_start)

    @checkpointed
    def step(self, e, z, starts, rope, mask, cache=None):
        """Eq. 1 to 3: return z (B, n, C) from e and the previous z (None: no correction)."""
        correction = torch.zeros_like(e) if z is None else self.correction(z, e, starts)
        h = F.dropout(e + correction, self.config.dropout, self.training)  # eq. 2: x~ starts from e each time
        for block in self.blocks:  # eq. 3
            h = block(h, rope, mask, cache)
        return h

    def unroll(self, z, e, z_before, starts, rope, mask, cache=None):
        """Eq. 5: return z^(k) (B, n, C) from z = z^(k-1), None if k = 1. z_before: (B, 1, C)."""
        previous = None if z is None else torch.cat([z_before, z[:, :-1]], 1)
        return self.step(e, previous, starts, rope, mask, cache)  # the paper corrects at the end of unroll k - 1

    def head_input(self, z):
        """Eq. 4: return the inputs of the output head. z: (B, n, C) -> (B, n, C)."""
        if self.config.variant == 'extra_ffn':
            z = z + self.extra(z)
        return self.norm(z)

    def prepare(self, idx, mask=None):
        """Return the inputs of `unroll` for sequences idx (B, T): e, z_{-1}, starts, rope, mask."""
        c, T, device = self.config, idx.shape[1], idx.device
        e, doc_start, position = self.embed(idx), document_starts(idx, c.eos_id), torch.arange(T, device=device)
        starts = (position == (0 if doc_start is None else doc_start)).expand_as(idx)
        rope = rope_table(position, c.head_size, c.rope_theta, c.rope_scaling)
        return e, torch.zeros_like(e[:, :1]), starts, rope, mask or make_mask(self, T, device, doc_start)

    def all_unrolls(self, idx, K):
        """Return [z^(1), ..., z^(K)], each (B, T, C), for sequences idx (B, T)."""
        inputs, zs = self.prepare(idx), [None]
        for _ in range(K):
            zs.append(self.unroll(zs[-1], *inputs))
        return zs[1:]

    def fixed_point(self, n_tokens, *inputs, limit=None):
        """Unroll until z stops changing. Returns z (B, n, C), and the number of unrolls.

        n_tokens: (B,) per right-padded row; inputs: of `unroll`. Stops if no z changes by more than
        prefill_tol of its norm, if changes within rounding error no longer shrink, or after n + 1
        unrolls (Lemma 1). Gives up, with None for z, if `limit` unrolls will not be enough.
        """
        kind = n_tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.embed.weight.dtype
        rounding = 16 * torch.finfo(dtype).eps  # rounding error of a few layers
        z, changes = self.unroll(None, *inputs), []  # changes: in unrolls 2, 3, ...
        corrects = torch.arange(z.shape[1], device=z.device) < n_tokens[:, None] - 1  # a row's last z corrects nothing
        for k in range(2, int(n_tokens.max()) + 2):
            last_z, z = z, self.unroll(z, *inputs)
            relative = (z - last_z).norm(dim=-1) / z.norm(dim=-1).clamp(min=1e-30)
            changes.append(relative.masked_fill(~corrects, 0).max().item())
            stalled = k > 2 and changes[-2] <= changes[-1] < rounding
            if changes[-1] <= self.config.prefill_tol or stalled:
                break
            if limit and k > 3 and expected_change(changes, limit) > max(rounding, self.config.prefill_tol):
                return None, k
        return z, k

    @outside_graphs  # the compiler would unroll all positions
    def stream(self, idx):
        """Run algorithm 1 with gradients, checkpointed in segments. idx: (B, T) -> z (B, T, C)."""
        T, segment_len = idx.shape[1], self.config.segment_len
        tokens = sequence(T, (0,), idx.device, document_starts(idx, self.config.eos_id))
        seen = dense_mask(self, self.sees, tokens, tokens).data.unflatten(2, (-1, T))  # (1 or B, 1 or HK, H / HK, T, T)
        e, z_before, starts, rope, _ = self.prepare(idx, Mask('dense', seen))  # given a mask, it makes none
        def segment(start, last_z, earlier):  # z and `Past` before the segment -> its list of z, and `Past` after it
            states, kv = [last_z], Past(earlier)  # a copy, because the backward pass runs this again
            for t in range(start, min(start + segment_len, T)):
                at, mask = slice(t, t + 1), Mask('dense', seen[..., t, :t + 1])
                states.append(self.step(e[:, at], states[-1], starts[:, at], [table[at] for table in rope], mask, kv))
            return states[1:], kv

        zs, past = [z_before], Past()
        with torch.autocast('cpu' if idx.is_meta else idx.device.type, enabled=False):  # meta: a dry run
            for start in range(0, T, segment_len):
                segment_z, past = checkpoint(segment, start, zs[-1], past, use_reentrant=False)
                zs += segment_z
        return torch.cat(zs[1:], 1)

    def states(self, idx):
        """Return z (B, T, C) of the last unroll (section 3.2) or, with bptt, of streaming."""
        if self.config.bptt:
            return self.stream(idx)
        K = self.drawn.n_unrolls if self.training else self.config.K
        z = self.all_unrolls(idx, K)[-1]
        if K == 1 and self.config.K > 1:  # zero gradients: AdamW skips weights without a gradient, and DDP fails
            z = z + 0 * sum(p.sum() for p in self.correction.parameters())
        return z

    def begin_step(self, rng):
        """Draw the next step's number of unrolls (section 3.2). rng must be equal on all ranks."""
        self.drawn.n_unrolls = rng.choice(self.K_choices)

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, mean nats per token. idx, targets: (B, T); -1 is ignored."""
        loss = self.nll(self.states(idx), counted_targets(idx, targets, self.config.eos_id))
        return {'loss': loss, 'nll': loss.detach()}

    def nll(self, z, targets):
        """Return the mean loss in nats for targets (B, T), -1 ignored, given z (B, T, C)."""
        rows = (self.head_input(z).flatten(0, 1), targets.flatten())
        total = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        return total['nll'] / (targets >= 0).sum().clamp(min=1)

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, C); targets: (N,)."""
        return {'nll': self.cross_entropy(self._logits(h), targets)}

    def _logits(self, h):
        """Return logits over all V rows, for the loss and decoding."""
        return self.head(h)

    def final_hidden(self, idx):
        """Return the head's inputs as in streaming, in training as in `forward`: (B, T, C)."""
        if (self.training and torch.is_grad_enabled()) or self.config.bptt or self.config.K == 1:
            return self.head_input(self.states(idx))  # with bptt or K = 1, it equals streaming
        with torch.no_grad():
            z, _ = self.fixed_point(idx.new_full((len(idx),), idx.shape[1]), *self.prepare(idx))
            return self.head_input(z)

    @torch.no_grad()
    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache`; z[:, p] is z of the token before position p."""
        cache, e = KVCache(self, batch_size, max_tokens, max_call, device, dtype), self.embed.weight
        if self.config.K > 1:
            cache.z = torch.zeros(batch_size, max_tokens + 2, e.shape[1], dtype=e.dtype, device=cache.hidden.device)
        return cache

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache; return next-token logits as in model_standard.py."""
        z = self.unroll_prompt(tokens, cache, lengths)
        h = self.head_input(self.extend_pieces(tokens, cache, lengths) if z is None else z)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def unroll_prompt(self, tokens, cache, lengths):
        """Return z (B, n, C) of a prompt by `fixed_point`, or None if streaming it takes less time.

        Only for speed, not in the paper. A call of the blocks costs its tokens plus `overhead`, so
        `limit` unrolls (n B tokens each) cost as much as streaming, n calls with B tokens.
        """
        B, n = tokens.shape
        if not self.sequential or self.config.bptt or n <= cache.max_call or cache.lengths.any():
            return None  # a model that is never unrolled, or not a prompt
        overhead = (4.5e3 if tokens.device.type == 'cpu' else 5e6) / self.config.n_embd  # tokens; on a GPU a guess
        limit = n * (overhead + B) / (overhead + n * B)
        if limit <= 20:
            return None  # four unrolls in vain, after which `fixed_point` may give up, would cost over a fifth
        for piece in cache.pieces(tokens, lengths):  # one, because the cache is empty
            z, _ = self.fixed_point(piece.n_new, *self.prepare(tokens, piece.mask()), cache, limit=limit)
            if z is None:
                return None  # the cache is still empty: `pieces` adds tokens to it when it continues
            cache.z[cache.batch_idx, piece.positions + 1] = z
        return z

    def extend_pieces(self, tokens, cache, lengths):
        """Return z (B, n, C) of new tokens, one after the other, or with K = 1 all at once."""
        zs = []
        for piece in cache.pieces(tokens, lengths, piece_len=1 if self.sequential else None):
            e, starts = self.embed(piece.tokens), piece.positions == piece.doc_start
            z_before = cache.z[cache.batch_idx, piece.positions[:, :1]] if self.sequential else None
            zs.append(self.step(e, z_before, starts, piece.rope, piece.mask(), cache))
            if self.sequential:
                cache.z[cache.batch_idx, piece.positions + 1] = zs[-1]
        return torch.cat(zs, 1)

    def adopt(self, tensors):
        """Add a correction network to weights without one. Its last layer is 0 (section 5.7)."""
        if self.config.block == 'gpt' and 'blocks.0.gate_up.weight' in tensors:
            raise ValueError("these are weights of model_standard's blocks: set block = 'llama'")
        own = {name: p.detach() for name, p in self.named_parameters() if name.startswith('correction.')}
        if not own or any(name in tensors for name in own):
            return tensors
        if self.config.variant not in ('add', 'concat', 'token_blind'):
            raise ValueError(f'K = 1 cannot be converted to {self.config.variant!r}: use add, concat or token_blind')
        zeros = {name: torch.zeros_like(p) for name, p in own.items() if name.startswith('correction.down')}
        return tensors | own | zeros

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T, attention included, mean over K_choices."""
        c, weights = self.config, {name: n_matrix_weights(part) for name, part in self.named_children()}
        unrolls = 1 if c.bptt else sum(self.K_choices) / len(self.K_choices)  # streaming is one pass
        corrections = 1 if c.bptt else unrolls - 1  # the first unroll has none
        pairs = 2 * c.n_layer * c.n_head * c.head_size * mean_keys(self.sees, T)  # 2 products, in multiplications
        blocks = weights['blocks'] + weights.get('extra', 0) + pairs
        return 6 * (weights['head'] + unrolls * blocks + corrections * weights.get('correction', 0))
