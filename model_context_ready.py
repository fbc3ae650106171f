"""The Context-Ready Transformer ("The Context-Ready Transformer", arXiv 2606.27538) and its baselines.

A token does not enter the blocks as a raw embedding. A small network first adds a correction, made from the token's
embedding and from the block output of the position before, which already holds the context:

    correction_t = corr_ffn(LN(z_{t-1} + e_t))        eq. 1  `correct`; network and LN are one FFN, `correction`
    x~_t = e_t + correction_t                         eq. 2  `enter`
    z_t = blocks(x~_t; keys and values of the past)   eq. 3  `_run_blocks`; `Block.forward` is a layer
    logits_t = W_head LN_f(z_t)                       eq. 4  `head_input`, then `head`

`step` is eq. 1 to 3. There are two ways through a sequence, and the second converges to the first (theorem 2):

    streaming   left to right, a step per token, as z_{t-1} is there when token t comes: a recurrent net (Algorithm 1)
    unrolls     K times, all positions at once: z^(k) is the step of e and z^(k-1), moved one position on (eq. 5). Each
                starts from e anew (non-cumulative); in the first the correction is 0, so K = 1 is the plain Transformer

What runs when:

    training, validation    `forward`, `states`: K unrolls (`_unrolled_states`); with bptt streaming (`stream`, `loop`)
    logits of sequences     `final_hidden`: unrolls until nothing changes (`_fixed_point`), or `loop`: see `prefill`
    decoding                `extend`, `_read`: a step per token; long prompts as `prefill` says

scans/context_ready.py is `loop` with few operators per position and a gradient written by hand. It runs where
`choose_scan` has shown that it gives the same states and gradients. The paper does not say which layers have biases:
here linear layers and LayerNorms have them, the head has none. With block = 'llama' the blocks are those of
model_standard.py, so that any pretrained Llama can be converted (section 5.7, `adopt`).

    B  batch        T  positions        C  width, n_embd        V  vocabulary rows, padded        n  positions of a call
    L  blocks, n_layer; the paper's D (N in a plain Transformer)    H  heads, HK of keys and values, each of size D
    K  unrolls      e  a token's embedding      z  the block output, the paper's h^(D), before the final norm
    correction^(k), z^(k)  after k unrolls, with correction^(0) = 0
    is_doc_start  marks a document's first token, before which z is 0 (z_{-1} in section 3.1, z_0 in 3.2)
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import attn_kernels
from attn_kernels import (
    KVCache,
    attention,
    document_starts,
    import_scan,
    linear_cross_entropy,
    outside_graphs,
    parse_rope_scaling,
    rms_norm,
    rope_table,
    rotate,
    slot_attention,
    visible,
)

fast = import_scan('context_ready')  # None without the folder scans/
VARIANTS = (  # what corrects a token; corr_ffn is Linear, GELU, Linear. Inferred: the paper does not say
    'add',  # corr_ffn(LN(z + e)), eq. 1; corr_ffn_add in table A3
    'concat',  # corr_ffn(LN([z, e])), 2C -> 4C -> C; corr_ffn_concat in table A3
    'token_blind',  # corr_ffn(LN(z)); corr_ffn in tables A2 and A3
    'tied',  # as add, with the linear layers of the last block's FFN (section 5.8; that it is the last one: inferred)
    'block_head',  # LN(z): "the block's own residual" (section 5.8, table A2; that this is z, and the LN: inferred)
    'extra_ffn',  # none: a plain Transformer with an FFN more, after its last block (inferred); Roformer-hFFN, table A2
)


@dataclass
class Config:
    n_layer: int = 5  # blocks, L
    n_head: int = 16  # attention heads, H
    n_embd: int = 1120  # width of the residual stream, C
    n_ffn: int | None = None  # width inside FFNs, None: 4 n_embd; of llama the blocks' alone, None: 3 n_embd
    block: str = 'gpt'  # gpt: LayerNorm, GELU, biases; llama: RMSNorm, SwiGLU, none; both rotary
    n_kv_head: int | None = None  # of llama: key and value heads, each read by H / HK query heads; None: n_head
    head_size: int | None = None  # of llama; None: n_embd / n_head
    qkv_bias: bool = False  # of llama: biases of queries, keys and values, as Qwen2 has them
    qk_norm: bool = False  # of llama: an RMSNorm of each head's query and key before the rotation, as Qwen3 has it
    tied_head: bool = False  # the output head shares the embedding's weights
    variant: str = 'add'  # of VARIANTS: the correction, or extra_ffn, the paper's Roformer-hFFN
    K: int = 5  # unrolls of a training step (with k_min: at most) and of validation; 1: the plain Transformer, Roformer
    k_min: int | None = None  # each step draws its unrolls from k_min ... K, uniformly (paper: 2); None: always K
    last_unrolls: int | None = None  # backpropagate through so many of the last unrolls only (ours); None: all
    bptt: bool = False  # train on streaming itself, by backpropagation through all positions, instead of on unrolls
    scan: str = 'auto'  # of bptt: loop, as it reads; fast: scans/, unchecked; auto: fast where both are shown to agree
    segment_len: int = 32  # positions that the loop's backward computes again at a time: fewer need less memory
    checkpoint_unrolls: bool = False  # keep only each unroll's result for the backward: a third more compute
    prefill: str = 'parallel'  # how prompts and `logits` are read: unrolls to the fixed point; sequential: Algorithm 1
    prefill_tol: float = 1e-6  # parallel prefill stops when no block output changes by this share of its size
    window: int | None = None  # positions before its own that a query sees, [t - W, t] in appendix A.4; None: all
    dropout: float = 0.0  # on x~ and the blocks' branches (inferred), anew in every unroll (section 3.2); paper: 0.2
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: str | None = None  # Llama 3's 'factor,low,high,tokens', as '8,1,4,8192'; None: none
    norm_eps: float = 1e-5  # added to the variance in LayerNorm, to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    vocab_size: int = 32000  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 32000  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in training's softmax
    eos_id: int | None = None  # the id that ends a document: attention and corrections stop there; None: one document

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'n_ids', 'rope_theta', 'norm_eps', 'init_std', 'prefill_tol'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        choices = {'variant': VARIANTS, 'block': ('gpt', 'llama'), 'prefill': ('parallel', 'sequential'),
                   'scan': ('loop', 'fast', 'auto')}
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                raise ValueError(f'{name} = {getattr(self, name)!r}: expected one of {", ".join(expected)}')
        of_K = [n for n in (self.k_min, self.last_unrolls) if n is not None]
        if not 1 <= self.K <= 1000 or not all(n >= 1 and (n <= self.K or self.K == 1) for n in of_K):
            raise ValueError(f'K = {self.K}, k_min = {self.k_min}, last_unrolls = {self.last_unrolls}: '
                             'expected K from 1 to 1000, the others from 1 to K (with K = 1 any), or None for K')
        if self.variant == 'extra_ffn' and self.K > 1:
            raise ValueError(f'variant = extra_ffn and K = {self.K}: Roformer-hFFN has nothing to unroll, use K = 1')
        if self.bptt and self.K == 1:
            raise ValueError(f'bptt = True with K = 1 (variant = {self.variant!r}): without a correction nothing runs '
                             'from position to position. Use K > 1, which builds the network')
        if self.bptt and (self.last_unrolls or self.checkpoint_unrolls):
            raise ValueError(f'bptt = True with last_unrolls = {self.last_unrolls} and checkpoint_unrolls = '
                             f'{self.checkpoint_unrolls}: streaming has no unrolls to cut or to compute again')
        if self.scan == 'fast' and not self.bptt:
            raise ValueError("scan = 'fast' with bptt = False: training by unrolls has one form only, auto or loop")
        if self.segment_len < 1:
            raise ValueError(f'segment_len = {self.segment_len}: expected at least 1 position')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None for 4 n_embd')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout}: expected 0 or more and less than 1')
        if self.window is not None and self.window < 0:
            raise ValueError(f'window = {self.window}: expected 0 or more positions, or None for all')
        if self.head_size is None and self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: '
                             'n_embd / n_head must be an even whole number')
        self.head_size = self.head_size or self.n_embd // self.n_head
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f'head_size = {self.head_size}: expected an even number, or None for n_embd / n_head')
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(f'n_kv_head = {self.n_kv_head}: expected a divisor of n_head = {self.n_head}, or None')
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)
        is_plain = (self.n_kv_head, self.n_head * self.head_size) == (self.n_head, self.n_embd)
        if self.block == 'gpt' and (self.qkv_bias or self.qk_norm or not is_plain):
            raise ValueError("n_kv_head, head_size, qkv_bias and qk_norm are settings of block = 'llama'")
        if self.block == 'llama' and (self.variant in ('tied', 'extra_ffn') or self.scan == 'fast'):
            raise ValueError(f"block = 'llama' with variant = {self.variant!r} and scan = {self.scan!r}: expected add, "
                             'concat, token_blind or block_head, and auto or loop')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or (4 if self.block == 'gpt' else 3) * self.n_embd

    @property
    def K_choices(self):
        """The K that a training step may draw."""
        return range(min(self.k_min or self.K, self.K), self.K + 1)


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

    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.layer, self.n_head = layer, config.n_head
        self.norm = nn.LayerNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def forward(self, h, rotate, attend):
        """h (B, T, C) -> (B, T, C).

        rotate(qk) rotates queries and keys (B, T, H + HK, D) by their positions (RoPE). attend(layer, q (B, T, H, D),
        k, v (B, T, HK, D)) -> (B, T, H, D) is the attention, over the whole sequence in training and over a cache in
        decoding. It takes q and k as they come from rotate: on a GPU decoding rotates them in its kernel.
        """
        B, T, C = h.shape
        qkv = self.qkv(self.norm(h)).view(B, T, 3 * self.n_head, C // self.n_head)
        qk, v = qkv.tensor_split([2 * self.n_head], 2)
        q, k = rotate(qk).chunk(2, 2)
        return self.out(attend(self.layer, q, k, v).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.attn = Attention(config, layer)
        self.ffn = FFN(config.n_embd, config.n_ffn, config.n_embd, config.norm_eps)

    def forward(self, h, rotate, attend):
        """A layer of eq. 3. h (B, T, C) -> (B, T, C); rotate and attend as in `Attention.forward`."""
        p = self.config.dropout
        h = h + F.dropout(self.attn(h, rotate, attend), p, self.training)  # a^(i), from h^(i-1)
        return h + F.dropout(self.ffn(h), p, self.training)  # h^(i), from a^(i)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class LlamaBlock(nn.Module):
    """The block of model_standard.py: RMSNorm, grouped queries, SwiGLU, no biases."""

    def __init__(self, config, layer):
        super().__init__()
        C, D, n_ffn = config.n_embd, config.head_size, config.n_ffn
        self.config, self.layer = config, layer
        self.attn_norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, (config.n_head + 2 * config.n_kv_head) * D, bias=config.qkv_bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.attn_out = nn.Linear(config.n_head * D, C, bias=False)
        self.ffn_norm = RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)

    def forward(self, h, rotate, attend):
        """A layer of eq. 3. h (B, T, C) -> (B, T, C); rotate and attend as in `Attention.forward`."""
        p, H, HK = self.config.dropout, self.config.n_head, self.config.n_kv_head
        qkv = self.qkv(self.attn_norm(h)).unflatten(-1, (H + 2 * HK, self.config.head_size))
        qk, v = qkv.split([H + HK, HK], 2)
        if self.q_norm is not None:
            q, k = qk.split([H, HK], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = rotate(qk).split([H, HK], 2)
        h = h + F.dropout(self.attn_out(attend(self.layer, q, k, v).flatten(2)), p, self.training)
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + F.dropout(self.ffn_out(F.silu(gate) * up), p, self.training)


class Cache(KVCache):
    """`KVCache` and z of the last call's tokens, as the next token's correction is made from the z before it."""

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype, z_dtype):
        c = config
        super().__init__(c.n_layer, c.n_kv_head, c.head_size, batch_size, max_tokens, max_run, c.n_embd, [c.window],
                         rope_theta=c.rope_theta, rope_scaling=c.rope_scaling, eos_id=c.eos_id, device=device,
                         dtype=dtype)
        # z[:, 0] is of the token before the last call, z[:, 1 + i] of that in hidden[:, i]: decoding can go on from
        # any of them, also after a rollback of the whole call. At first it is 0, the paper's z_{-1}.
        self.z = torch.zeros(batch_size, max_run + 1 if c.K > 1 else 0, c.n_embd, device=device, dtype=z_dtype)
        self.n_unrolls = None  # of the last parallel prefill

    def last_z(self):
        """z of each row's last token (B, 1, C)."""
        return self.z[self.batch_idx, 1 + self.last[:, None]]

    def keep_z(self, place, z):
        """Notes z (B, n, C) of a call, and the z before it; of a call longer than max_run, of its last tokens.

        Before `end`, which moves `last`.
        """
        z = torch.cat([self.last_z(), z.to(self.z.dtype)], 1)
        tail = torch.cat([place.tail_idx[:, :1], 1 + place.tail_idx], 1)
        self.z[:, :tail.shape[1]] = z[self.batch_idx, tail]


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        C = c.n_embd
        self.embed = nn.Embedding(c.vocab_size, C)
        make_block = Block if c.block == 'gpt' else LlamaBlock
        self.blocks = nn.ModuleList(make_block(c, layer) for layer in range(c.n_layer))
        if c.variant == 'extra_ffn':
            self.extra = FFN(C, c.n_ffn, C, c.norm_eps)
        elif c.K > 1 and c.variant == 'block_head':
            self.correction = nn.LayerNorm(C, c.norm_eps)
        elif c.K > 1:
            n_inner = c.n_ffn if c.block == 'gpt' else 4 * C
            self.correction = FFN(2 * C if c.variant == 'concat' else C, n_inner, C, c.norm_eps)
            if c.variant == 'tied':  # a norm of its own, the weights of the last block
                self.correction.up, self.correction.down = self.blocks[-1].ffn.up, self.blocks[-1].ffn.down
        self.norm = nn.LayerNorm(C, c.norm_eps) if c.block == 'gpt' else RMSNorm(C, c.norm_eps)
        self.head = nn.Linear(C, c.vocab_size, bias=False)
        if c.tied_head:
            self.head.weight = self.embed.weight
        self.n_unrolls = c.K  # K of this training step
        self.scan_report = None  # of `choose_scan`: which form of streaming runs, and why
        # This sets every matrix and bias: what is to start otherwise is set after it. The paper does not say how; as in
        # model_standard.py, attention's output alone is scaled down with depth.
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                scale = (2 * c.n_layer) ** -0.5 if name.endswith(('attn.out.weight', 'attn_out.weight')) else 1.0
                nn.init.normal_(p, std=c.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    # ---- eq. 1 to 4 ----

    def embed_tokens(self, idx):
        """idx (B, n) -> e (B, n, C)."""
        return self.embed(idx)

    def correct(self, z, e, is_doc_start):
        """Eq. 1: the correction (B, n, C) of tokens e (B, n, C), from z (B, n, C) of the position before each.

        Where is_doc_start (B, n), nothing comes before: z counts as 0, the paper's z_{-1}.
        """
        z = z.masked_fill(is_doc_start.unsqueeze(-1), 0)
        if self.config.variant == 'concat':
            return self.correction(torch.cat([z, e], -1))
        if self.config.variant in ('token_blind', 'block_head'):
            return self.correction(z)
        return self.correction(z + e)

    def enter(self, e, correction):
        """Eq. 2: x~, what enters the blocks (B, n, C). Of e, not of the last unroll's x~: corrections do not add up."""
        return e + correction

    def _run_blocks(self, x, rotate, attend):
        """Eq. 3: what enters (B, n, C) -> z (B, n, C). rotate and attend as in `Attention.forward`."""
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotate, attend)
        return x

    def first_unroll(self, e, rotate, attend):
        """Eq. 2 and 3 with correction^(0) = 0: z of tokens e (B, n, C). With K = 1 that is the model."""
        return self._run_blocks(self.enter(e, torch.zeros_like(e)), rotate, attend)

    def step(self, e, z, is_doc_start, rotate, attend):
        """Eq. 1 to 3: z of tokens e (B, n, C), from z (B, n, C) of the position before each.

        Of one position that is a step of Algorithm 1, of all positions an unroll (`_unroll`).
        """
        return self._run_blocks(self.enter(e, self.correct(z, e, is_doc_start)), rotate, attend)

    def head_input(self, z):
        """Eq. 4: what the head multiplies. z (B, n, C) -> (B, n, C)."""
        if self.config.variant == 'extra_ffn':
            z = z + self.extra(z)
        return self.norm(z)

    # ---- whole sequences ----

    def places(self, idx):
        """Of sequences idx (B, T): e (B, T, C), doc_start or None, is_doc_start (B, T), the rotary table (cos, sin)."""
        c, position = self.config, torch.arange(idx.shape[1], device=idx.device)
        doc_start = document_starts(idx, c.eos_id)
        is_doc_start = (position == (0 if doc_start is None else doc_start)).expand_as(idx)
        rope = rope_table(position, c.head_size, c.rope_theta, c.rope_scaling)
        return self.embed_tokens(idx), doc_start, is_doc_start, rope

    def _prepare(self, idx):
        """Of sequences idx (B, T), for unrolls: e (B, T, C), is_doc_start (B, T), rotate, attend."""
        e, doc_start, is_doc_start, rope = self.places(idx)

        def attend(layer, q, k, v):
            return attention(q, k, v, doc_start, self.config.window)
        return e, is_doc_start, lambda qk: rotate(qk, *rope), attend

    def states(self, idx):
        """z as training sees it: streamed with bptt, else after this step's unrolls. idx (B, T) -> z (B, T, C)."""
        if self.config.bptt:
            return self.stream(idx, compiled=torch.compiler.is_compiling())
        return self._unrolled_states(idx)

    @torch.compiler.disable(recursive=False)  # one unroll is compiled, for any K
    def _unrolled_states(self, idx):
        """z^(K) (B, T, C) of sequences idx (B, T)."""
        c = self.config
        e, is_doc_start, rotate, attend = self._prepare(idx)
        K = self.n_unrolls if self.training else c.K
        unroll = self._checkpointed_unroll if c.checkpoint_unrolls and self.training else self._unroll
        z, z_before = None, torch.zeros_like(e[:, :1])
        for k in range(K):
            with_gradient = k >= K - (c.last_unrolls or K)
            with torch.set_grad_enabled(torch.is_grad_enabled() and with_gradient):
                z = unroll(e, z, z_before, is_doc_start, rotate, attend)
        if K == 1 < c.K:  # then nothing uses the correction's weights, and processes average gradients of all weights
            z = z + 0 * sum(p.sum() for p in self.correction.parameters())
        return z

    def _unroll(self, e, z, z_before, is_doc_start, rotate, attend):
        """An unroll (eq. 5): z^(k) of tokens e (B, n, C), from z^(k-1), None for k = 1.

        The correction of t is made from z^(k-1) of t - 1 (past-only): z moves one on, and z_before (B, 1, C), that of
        the position before e, comes first. The paper ends unroll k with correction^(k); here unroll k + 1 begins with
        it, so that an unroll is a `step`, and the last correction, which nothing reads, is not made.
        """
        if z is None:
            return self.first_unroll(e, rotate, attend)
        return self.step(e, torch.cat([z_before.to(z.dtype), z[:, :-1]], 1), is_doc_start, rotate, attend)

    def _checkpointed_unroll(self, *args):
        """`_unroll`, computed again in the backward."""
        # a method, as `_unrolled_states` runs outside the compiler: here it sees `checkpoint` and the unroll as one
        return checkpoint(self._unroll, *args, use_reentrant=False)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token.

        The loss is that of the last unroll alone (section 3.2): in training after the K that `begin_step` drew, in
        evaluation after the setting's K. With bptt it is that of streaming. With documents on, positions whose input is
        eos do not count.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        loss = self.nll(self.states(idx), targets)
        return {'loss': loss, 'nll': loss.detach()}

    def nll(self, z, targets):
        """Mean nats of targets (B, T), -1 ignored, given block outputs z (B, T, C)."""
        # linear_cross_entropy makes logits in parts, without `_logits`: an edit there belongs here too.
        weight = self.head.weight if self.config.pad_rows_in_loss else self.head.weight[:self.config.n_ids]
        return linear_cross_entropy(self.head_input(z).flatten(0, 1), weight, targets.flatten())

    def begin_step(self, rng):
        """Draws K of the next training step (section 3.2). rng: a random.Random, equal on all processes."""
        self.n_unrolls = rng.choice(self.config.K_choices)

    def iterates(self, idx):
        """Of sequences idx (B, T), without end: (z^(k), correction^(k)), each (B, T, C), for k = 1, 2, ..."""
        e, is_doc_start, rotate, attend = self._prepare(idx)
        z, z_before = None, torch.zeros_like(e[:, :1])
        while True:
            z = self._unroll(e, z, z_before, is_doc_start, rotate, attend)
            yield z, self.correct(torch.cat([z_before, z[:, :-1]], 1), e, is_doc_start)

    def _fixed_point(self, e, z_before, is_doc_start, is_token, rotate, attend):
        """The unrolls' fixed point (theorem 2): z (B, n, C), and how many it took. is_token (B, n): false for padding.

        Ends when no z changes by more than prefill_tol of its norm; or when the changes are as small as rounding and
        shrink no more; or after one unroll more than there are tokens, when all are exact (Lemma 1). A row's last z is
        not looked at: it is made from the z before it one unroll ago, which move no more.
        """
        device = e.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype
        rounding = 16 * torch.finfo(dtype).eps  # of a few layers
        n_tokens, z, last_change = int(is_token.sum(1).max()), None, math.inf
        for k in range(1, n_tokens + 2):
            last, z = z, self._unroll(e, z, z_before, is_doc_start, rotate, attend)
            if k == 1 or n_tokens == 1:
                continue
            changes = (z - last).norm(dim=-1) / z.norm(dim=-1).clamp(min=1e-30)
            change = changes[:, :-1][is_token[:, 1:]].max().item()
            if change < self.config.prefill_tol or last_change <= change < rounding:
                break
            last_change = change
        return z, k

    def adopt(self, tensors):
        """Named weights of the run that this model is made from (section 5.7), and those of a new correction network.

        The source is a K = 1 run, or with block = 'llama' a model_standard run. The network's last layer is 0, so the
        model computes what its source does. Weights that have a correction already, or are for a model without one,
        come back as they are. Raises ValueError for a variant without a last layer of its own, and for weights of
        model_standard's blocks where block is 'gpt'.
        """
        if self.config.block == 'gpt' and 'blocks.0.gate_up.weight' in tensors:
            raise ValueError("these are weights of model_standard's blocks: set block = 'llama'")
        own = {name: p.detach() for name, p in self.named_parameters() if name.startswith('correction.')}
        if not own or any(name in tensors for name in own):
            return tensors
        if self.config.variant not in ('add', 'concat', 'token_blind'):
            raise ValueError(f'a K = 1 run cannot be converted to variant = {self.config.variant!r}, which has no '
                             'layer that could start at 0: use add, concat or token_blind')
        for name, p in own.items():
            if name.startswith('correction.down'):
                own[name] = torch.zeros_like(p)
        return tensors | own

    # ---- streaming whole sequences, to train by backpropagation through time ----

    @outside_graphs
    def stream(self, idx, compiled=False):
        """Algorithm 1 over whole sequences, in the form that `choose_scan` chose. idx (B, T) -> z (B, T, C).

        In the dtype of the weights: autocast does not reach it. compiled: as in `loop`.
        """
        if self.scan_report is None or self.scan_report['device'] != idx.device.type:
            self.choose_scan()
        with torch.autocast(idx.device.type, enabled=False):
            if self.scan_report['scan'] == 'fast':
                return fast.stream(self, idx)
            return self.loop(idx, compiled)

    def choose_scan(self):
        """Decides whether `stream` runs `loop` or its fast form: the report of `attn_kernels.choose_scan`.

        The first forward does so, and the first on a device of another type. Call it again after an edit of a living
        model, as a swapped module or a new hook. Without bptt there is nothing to choose: None; `stream` is the loop.
        """
        c = self.config
        if not c.bptt:
            self.scan_report = {'scan': 'loop', 'device': self.embed.weight.device.type, 'unused': []}
            return None
        window = None if c.window is None else min(c.window, 5)
        scan = fast if c.block == 'gpt' else None
        # in the check's 8 or 12 tokens the window then has an edge, and a segment an end
        self.scan_report = attn_kernels.choose_scan(self, scan, segment_len=4, window=window)
        return self.scan_report

    @property
    def reads_weights(self):
        """Whether it multiplies by weights without calling the layers, as scans/context_ready.py does."""
        return self.scan_report is not None and self.scan_report['scan'] == 'fast'

    @outside_graphs
    def loop(self, idx, compiled=False):
        """Algorithm 1 as it reads, one position after another. idx (B, T) -> z (B, T, C), differentiable.

        The backward computes segment_len positions again at a time; it keeps only z, and keys and values between
        segments. compiled: compiles the step, which is one graph, as its shapes do not depend on the position.
        """
        c, (B, T) = self.config, idx.shape
        e, doc_start, is_doc_start, (cos, sin) = self.places(idx)
        position = torch.arange(T, device=idx.device)
        n_keys = T if c.window is None else min(c.window + 1, T)  # that a query may see: its own is the last of them
        key_pos = position[:, None] + torch.arange(1 - n_keys, 1, device=idx.device)  # (T, n_keys)
        first_key = torch.zeros_like(idx) if doc_start is None else doc_start  # 0 hides slots that hold no key yet
        mask = visible(position[:, None], key_pos, first_key[..., None], c.window).squeeze(2)  # (B, T, n_keys)
        step = torch.compile(self._step_at) if compiled else self._step_at

        def segment(start, end, z, keys, values):
            zs = []
            for t in range(start, end):
                at = slice(t, t + 1)
                z, keys, values = step(e[:, at], z, is_doc_start[:, at], cos[at], sin[at], mask[:, at], keys, values)
                zs.append(z)
            return torch.cat(zs, 1), z, keys, values

        no_keys = e.new_zeros(B, c.n_kv_head, n_keys, c.head_size)
        z, keys, values = torch.zeros_like(e[:, :1]), [no_keys] * c.n_layer, [no_keys] * c.n_layer
        segments = []
        for start in range(0, T, c.segment_len):
            end = min(start + c.segment_len, T)
            zs, z, keys, values = checkpoint(segment, start, end, z, keys, values, use_reentrant=False)
            segments.append(zs)
        return torch.cat(segments, 1)

    def _step_at(self, e, z, is_doc_start, cos, sin, mask, keys, values):
        """`step` at one position. keys, values: of each layer (B, HK, n_keys, D), of the last positions, newest last.

        The position's own come in at the end and the oldest go, so that all shapes are the same at every position: one
        compiled graph. mask (B, 1, n_keys): which keys it sees, its own among them. Returns z (B, 1, C), keys, values.
        """
        keys, values = list(keys), list(values)

        def attend(layer, q, k, v):
            keys[layer] = torch.cat([keys[layer][:, :, 1:], k.transpose(1, 2)], 2)
            values[layer] = torch.cat([values[layer][:, :, 1:], v.transpose(1, 2)], 2)
            return slot_attention(q, keys[layer], values[layer], mask)
        z = self.step(e, z, is_doc_start, lambda qk: rotate(qk, cos, sin), attend)
        return z, keys, values

    # ---- decoding ----

    @property
    def sequential(self):
        """Whether a short call of `extend` takes a pass per token, so that verifying a draft saves no time."""
        return self.config.K > 1

    @property
    def exact_len(self):
        """How many tokens of a sequence have the loss of streaming; None: all.

        By Lemma 1 correction^(k) is exact at the first k positions. z^(K) is made with correction^(K-1), so it is exact
        at the first K - 1.
        """
        return None if self.config.bptt or self.config.K == 1 else self.config.K - 1

    @torch.no_grad()
    def final_hidden(self, idx):
        """What the head multiplies, as streaming gives it, without gradient. idx (B, T) -> (B, T, C)."""
        if self.config.bptt or self.config.K == 1:  # the states are those of streaming already
            return self.head_input(self.states(idx))
        if self.config.prefill == 'sequential':
            return self.head_input(self.loop(idx))
        e, is_doc_start, rotate, attend = self._prepare(idx)
        is_token = torch.ones_like(is_doc_start)
        z, _ = self._fixed_point(e, torch.zeros_like(e[:, :1]), is_doc_start, is_token, rotate, attend)
        return self.head_input(z)

    @torch.no_grad()
    def logits(self, idx):
        """Next-token logits at every position, as streaming gives them. idx (B, T) -> (B, T, V).

        -inf for ids that only pad the vocabulary.
        """
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        """What the head makes of h (..., C). Training's loss does not pass here: an edit belongs in `nll` too."""
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        weight = self.embed.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        return Cache(self.config, batch_size, max_tokens, max_run, device, dtype, weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a draft are this one call. Calls of n <= cache.max_run are
        streamed, have static shapes and never wait for the device; longer ones go as `prefill` says. Raises
        ValueError if a row has no room left (`KVCache.begin`).
        """
        place = cache.begin(tokens, lengths)
        z = self._read(tokens, cache, place)
        h = self.head_input(z)
        if self.config.K > 1:
            cache.keep_z(place, z)
        last = cache.end(place, h)
        return self._logits(h if all_positions else last)

    def _read(self, tokens, cache, place):
        """z (B, n, C) of tokens (B, n) at their place in the cache, which takes their keys and values."""
        c, n, e = self.config, tokens.shape[1], self.embed_tokens(tokens)
        if c.K == 1:
            return self.first_unroll(e, place.rotate, partial(cache.attend, place))
        is_doc_start = place.positions == (0 if place.doc_start is None else place.doc_start)
        z = cache.last_z()
        if n > cache.max_run and c.prefill == 'parallel':
            is_token = torch.arange(n, device=tokens.device) < place.n_new[:, None]
            attend = partial(cache.attend, place)
            z, cache.n_unrolls = self._fixed_point(e, z, is_doc_start, is_token, place.rotate, attend)
            return z
        zs = []
        for t in range(n):  # Algorithm 1
            at = slice(t, t + 1)
            now = place[:, at]
            z = self.step(e[:, at], z, is_doc_start[:, at], now.rotate, partial(cache.attend, now))
            zs.append(z)
        return torch.cat(zs, 1)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in sequences of T, attention's among them, mean over the unrolls drawn."""
        c = self.config
        n_keys = T if c.window is None else min(c.window + 1, T)
        keys = n_keys - n_keys * (n_keys - 1) / 2 / T  # that a query sees, mean over the sequence
        unrolls = [1] if c.bptt else c.K_choices  # streaming is one pass
        corrections = [1] if c.bptt else [K - 1 for K in c.K_choices]  # the first unroll has none

        def n_weights(module):
            return sum(p.numel() for p in module.parameters() if p.dim() >= 2)

        def passes(counts):
            """FLOPs of a weight, mean over the steps: 2 forward, and in the last unrolls 4 backward."""
            return sum(2 * n + 4 * min(n, c.last_unrolls or c.K) for n in counts) / len(counts)
        blocks = n_weights(self.blocks) + 2 * c.n_layer * c.n_head * c.head_size * keys
        if c.variant == 'extra_ffn':
            blocks += n_weights(self.extra)
        flops = 6 * self.head.weight.numel() + passes(unrolls) * blocks
        if c.K > 1:
            flops += passes(corrections) * n_weights(self.correction)
        return flops
