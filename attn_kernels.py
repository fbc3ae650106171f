"""Code shared by the models: attention patterns, KV cache, rotary embeddings and a chunked loss.

An attention pattern is a function `sees(q, k)` in the model file. q and k are `Tokens` with integer
fields pos, stream and doc_start that broadcast; the result is True where query q attends to key k.
The standard Transformer's pattern is

    def sees(self, q, k):
        return (k.pos <= q.pos) & (q.pos - k.pos <= self.reach) & (k.pos >= q.doc_start)

Everything else is derived from it: attention tiles on a CPU, FlexAttention's block mask on a GPU,
masks for decoding, and the size of the KV cache. An edited pattern both trains and decodes.

    patterns        Tokens, document_starts, make_mask, attention
    layers          check_shape, rope_table and rotate, chunked_loss, mask_padding, checkpointed
    KVCache         decoding state
    digest          fingerprint of source code, which pins the code in scans/ to the equations
    Triton          optional attention kernels: --attention=triton

With two streams, x (stream 0) and rho (stream 1), a sequence is [x | rho]: T positions of x, then T
of rho. In grouped-query attention, query head h reads key head h // (H / HK).

B batch, T positions, H heads, HK key heads, D head size, n tokens of a call, C width, V vocabulary.
"""
import functools
import hashlib
import inspect
import io
import math
import os
import textwrap
import tokenize
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # no Triton for this platform
    triton = tl = constexpr = None
    jit = lambda kernel: kernel

KERNELS_ON_CPU = os.environ.get('TRITON_INTERPRET') == '1'  # Triton's interpreter: slow, for tests
TILE_ROWS = 128  # query rows of a CPU tile, over all streams
KEY_BLOCK = 64  # CPU tiles load keys in whole blocks of this size
MAX_SAVED_SCORES = 2 ** 22  # queries x keys up to which tiles save probabilities for the backward pass
EMPTY_SLOT = 2 ** 30  # position of empty cache slots: later than any query


def outside_graphs(function):
    """Make a function run eagerly inside a compiled model (decorator).

    Like torch.compiler.disable, which also imports the compiler: a second, even in eager mode.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)
    # own code object: after too many recompilations of a shared one, the compiler skips the wrapper
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return call


# ---- patterns ----

class Tokens(NamedTuple):
    """Queries or keys of a pattern: integer tensors that broadcast against each other."""

    pos: torch.Tensor  # position in the sequence
    stream: torch.Tensor  # 0, or with two streams 0 for x and 1 for rho
    doc_start: torch.Tensor | int = 0  # queries only: position of the first token of the query's document


def document_starts(idx, eos_id):
    """Return where each token's document starts: (B, T) int64, or None if eos_id is None.

    idx: (B, T). An eos belongs to the document that it ends. The first token starts a document.
    """
    if eos_id is None:
        return None
    position = torch.arange(idx.shape[1], device=idx.device).expand_as(idx)
    starts = F.pad(idx[:, :-1] == eos_id, (1, 0))
    return torch.where(starts, position, 0).cummax(1).values


@dataclass
class Mask:
    """A pattern prepared for `attention`, made by `make_mask` or `Run.mask`."""

    kind: str  # causal, tiles, flex, triton or dense
    data: Any = None


@outside_graphs
def make_mask(sees, T, head_size, device, doc_start=None, keys=(0,), queries=None, reaches=None):
    """Prepare the attention of whole sequences: once per step, for all layers.

    Args:
        sees: the pattern, see the top of the file
        doc_start: (B, T) int64 from `document_starts`, or None for one document
        keys, queries: tuples of streams that are keys, queries; queries=None: the same as keys
        reaches: if given, use the Triton kernels (see `triton_attention`)

    On a GPU, FlexAttention compiles a kernel per length, so it is used for training and for lengths
    that are multiples of its 128 x 128 blocks. Other lengths (prompts) use a dense mask.
    """
    queries = queries or keys
    device = torch.device(device)
    if reaches is not None:
        check_triton(sees, head_size, device)
        return Mask('triton', (doc_start, [reaches[stream] for stream in keys], T, queries[0]))
    if device.type == 'cpu':
        return Mask('tiles', list(_tiles(sees, T, doc_start, keys, queries, device)))
    if device.type == 'cuda' and len(keys) == 1 and doc_start is None:
        seen = _whole_mask(sees, T, None, keys, queries, device)
        if torch.equal(seen, torch.ones_like(seen).tril()):
            return Mask('causal')
    if device.type == 'cuda' and 16 <= head_size <= 256 and (torch.is_grad_enabled() or T % 128 == 0):
        return Mask('flex', make_block_mask(sees, T, device, doc_start, keys, queries))
    return Mask('dense', _whole_mask(sees, T, doc_start, keys, queries, device))


def _sequence(T, streams, device, doc_start=None):
    """Return the `Tokens` of [x | rho] or of one stream: int32 for speed, (1 or B, S T)."""
    pos = torch.arange(T, device=device, dtype=torch.int32).repeat(1, len(streams))
    stream = torch.tensor([streams], device=device, dtype=torch.int32).repeat_interleave(T, 1)
    start = torch.zeros_like(pos) if doc_start is None else doc_start.int().repeat(1, len(streams))
    return Tokens(pos, stream, start)


def _seen(sees, q, k):
    """Return the pattern as booleans (1 or B, n_q, n_k), given tokens with fields (1 or B, n)."""
    return sees(Tokens(*(x.unsqueeze(2) for x in q)), Tokens(k.pos.unsqueeze(1), k.stream.unsqueeze(1)))


def _whole_mask(sees, T, doc_start, keys, queries, device):
    """Return the pattern of whole sequences as booleans (1 or B, n_q, n_k)."""
    return _seen(sees, _sequence(T, queries, device, doc_start), _sequence(T, keys, device))


def attention(q, k, v, mask):
    """Return softmax(q k^T / sqrt(D)) v under a mask: (B, n_q, H, D).

    q: (B, n_q, H, D); k, v: (B, n_k, HK, D); mask: from `make_mask` or `Run.mask`.
    """
    if mask.kind == 'triton':
        return triton_attention(q, k, v, *mask.data)
    if mask.kind == 'dense':
        return _dense_sdpa(q, k, v, mask.data)
    if k.shape[2] < q.shape[2]:  # repeat key heads, one for each query head
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, n, D)
    if mask.kind == 'tiles':
        out = _tiled_attention(q, k, v, mask.data)
    elif mask.kind == 'flex':
        out = _flex_attention(q, k, v, mask.data)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


def _dense_sdpa(q, k, v, seen):
    """Run PyTorch's attention with a boolean mask (B or 1, n_q, n_k), in the dtype of the keys."""
    dtype, n, group = q.dtype, q.shape[1], q.shape[2] // k.shape[2]
    # query heads that share a key head become rows of one product
    q = q.to(k.dtype).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = seen.repeat(1, group, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), seen)
    return out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


# ---- on a GPU: FlexAttention ----

def make_block_mask(sees, T, device, doc_start, keys, queries):
    """Make FlexAttention's BlockMask: the 128 x 128 blocks to visit and the masks inside them."""
    from torch.nn.attention.flex_attention import create_block_mask
    q_streams, k_streams = (torch.arange(streams[0], streams[-1] + 1, device=device) for streams in (queries, keys))

    def mask_mod(b, h, q_idx, k_idx):
        q_pos, k_pos = q_idx % T, k_idx % T
        start = torch.zeros_like(q_pos) if doc_start is None else doc_start[b, q_pos]
        q = Tokens(q_pos, q_streams[q_idx // T], start)
        return sees(q, Tokens(k_pos, k_streams[k_idx // T]))

    on_gpu = torch.device(device).type == 'cuda'
    create = _compiled(create_block_mask) if on_gpu else create_block_mask  # eager mode holds all n_q x n_k booleans
    B = None if doc_start is None else len(doc_start)
    with torch.no_grad():  # otherwise compiled twice, with and without gradients
        return create(mask_mod, B, None, len(queries) * T, len(keys) * T, device)


def _flex_attention(q, k, v, block_mask):
    from torch.nn.attention.flex_attention import flex_attention
    run = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    # contiguous: PyTorch 2.11's kernel for short queries ignores a slice's offset (issue 175325)
    return run(q.contiguous(), k, v, block_mask=block_mask)


@functools.cache
def _compiled(function):
    return torch.compile(function)


# ---- on a CPU: tiles ----

def _tiles(sees, T, doc_start, keys, queries, device):
    """Yield each tile's query rows and key ranges (lists of slices), and its bias of 0 or -inf."""
    q, k = _sequence(T, queries, device, doc_start), _sequence(T, keys, device)
    step = TILE_ROWS // len(queries)
    for a in range(0, T, step):
        rows = [slice(s * T + a, s * T + min(a + step, T)) for s in range(len(queries))]
        seen = _seen(sees, Tokens(*(torch.cat([x[:, part] for part in rows], 1) for x in q)), k)
        ranges = _key_ranges(seen.any(0).any(0), T)
        seen = torch.cat([seen[..., part] for part in ranges], -1).unsqueeze(1)
        yield rows, ranges, torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float('-inf'))


def _key_ranges(needed, T):
    """Return slices of whole key blocks that cover all needed keys. needed: (S T,) bool."""
    blocks = F.pad(needed.view(-1, T), (0, -T % KEY_BLOCK)).unflatten(1, (-1, KEY_BLOCK)).any(2)
    steps = F.pad(blocks.long(), (1, 1)).diff()  # 1 where a range of blocks starts, -1 where it has ended
    edges = zip((steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist())
    return [slice(stream * T + start * KEY_BLOCK, stream * T + min(stop * KEY_BLOCK, T))
            for (stream, start), (_, stop) in edges]


@outside_graphs  # the compiler would unroll the tiles of all layers and take minutes
def _tiled_attention(q, k, v, tiles):
    return _TiledAttention.apply(q, k, v, tiles)


class _TiledAttention(torch.autograd.Function):
    """Attention in tiles, on a CPU. q: (B, H, n_q, D); k, v: (B, H, n_k, D)."""

    @staticmethod
    def forward(ctx, q, k, v, tiles):
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (q * q.shape[-1] ** -0.5).contiguous(), k.contiguous(), v.contiguous()
            out, saved = torch.empty_like(q), []
            saves = any(ctx.needs_input_grad) and q.shape[2] * k.shape[2] <= MAX_SAVED_SCORES
            for rows, ranges, bias in tiles:
                p = _probabilities(_take(q, rows), _take(k, ranges), bias)
                _put(out, rows, p @ _take(v, ranges))
                if saves:
                    saved.append(p)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.tiles = tiles
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *saved = ctx.saved_tensors
        wide = torch.promote_types(k.dtype, torch.float32)  # sums over many tiles
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for i, (rows, ranges, bias) in enumerate(ctx.tiles):
            q_tile, k_tile, grad_tile = _take(q, rows), _take(k, ranges), _take(grad, rows)
            p = saved[i] if saved else _probabilities(q_tile, k_tile, bias)
            dp = grad_tile @ _take(v, ranges).mT
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _put(dq, rows, ds @ k_tile)
            _put(dk, ranges, ds.mT @ q_tile, add=True)
            _put(dv, ranges, p.mT @ grad_tile, add=True)
        return dq * q.shape[-1] ** -0.5, dk.to(k.dtype), dv.to(v.dtype), None


def _probabilities(q, k, bias):
    return (q @ k.mT).add_(bias).softmax(-1)


def _take(x, slices):
    """Concatenate slices of positions of x (B, H, n, D)."""
    parts = [x[:, :, s] for s in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _put(x, slices, part, add=False):
    """Write `part` into the slices of x, or add it to them: the inverse of `_take`."""
    for s, piece in zip(slices, part.split([s.stop - s.start for s in slices], 2)):
        if add:
            x[:, :, s] += piece
        else:
            x[:, :, s] = piece


# ---- layers ----

def checkpointed(forward):
    """Apply activation checkpointing to a module's method if self.checkpoints is set (decorator).

    It wraps the method and not the module, to keep FSDP's hooks outside.
    """
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if self.checkpoints and self.training:
            return checkpoint(functools.partial(forward, self), *args, use_reentrant=False, **kwargs)
        return forward(self, *args, **kwargs)
    return call


@outside_graphs  # in a compiled graph, every layer would recompute the angles of every element
def rope_table(positions, head_size, theta, scaling=None):
    """Return RoPE's fp32 cos and sin of the angles position * theta^(-2j/D), j < D/2.

    positions: (...). Results: (..., 1, D), [cos | cos] and [-sin | sin], for `rotate`. scaling:
    Llama 3's 'factor,low,high,tokens'. Frequencies with fewer than `low` turns over `tokens`
    positions are divided by `factor`; those above `high` are kept, those between interpolated.
    """
    j = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    frequency = 1 / theta ** (j / head_size)
    if scaling:
        factor, low, high, tokens = parse_rope_scaling(scaling)
        turns = tokens * frequency / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / factor)
    angles = positions[..., None, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def check_shape(config):
    """Check a Config's sizes, and fill in head_size and n_kv_head if None. Raises ValueError."""
    c = config
    if c.head_size is None and (c.n_head < 1 or c.n_embd % (2 * c.n_head)):
        raise ValueError(f'n_embd = {c.n_embd} and n_head = {c.n_head}: n_embd / n_head must be an even whole number')
    c.head_size, c.n_kv_head = c.head_size or c.n_embd // c.n_head, c.n_kv_head or c.n_head
    if c.head_size % 2:
        raise ValueError(f'head_size = {c.head_size}: expected an even number')
    if c.n_head % c.n_kv_head:
        raise ValueError(f'n_kv_head = {c.n_kv_head}: expected a divisor of n_head = {c.n_head}')
    if c.rope_scaling is not None:
        parse_rope_scaling(c.rope_scaling)
    if c.n_ids > c.vocab_size:
        raise ValueError(f'vocab_size = {c.vocab_size} has no room for the {c.n_ids} ids of the tokenizer')


def n_matrix_weights(module):
    """Count the weights of all matrices but embeddings: each costs 2 FLOPs per token."""
    return sum(p.numel() for part in module.modules() if not isinstance(part, torch.nn.Embedding)
               for p in part.parameters(recurse=False) if p.dim() >= 2)


def mean_keys(sees, T, keys=(0,), queries=None):
    """Return how many keys the queries of a position attend to, mean over T (sampled if > 2048)."""
    queries, n = queries or keys, min(T, 2 ** 22 // T + 1)
    pos = ((torch.arange(n) + 0.5) * (T / n) - 0.5).round().long()
    q = Tokens(*(x.unflatten(1, (-1, T))[..., pos].flatten(1) for x in _sequence(T, queries, 'cpu')))
    return _seen(sees, q, _sequence(T, keys, 'cpu')).sum().item() / len(pos)


def parse_rope_scaling(text):
    """Return the four numbers of 'factor,low,high,tokens'. Raises ValueError."""
    try:
        factor, low, high, tokens = map(float, text.split(','))
    except ValueError:
        factor = low = high = tokens = 0.0
    if not (1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= tokens < math.inf):
        raise ValueError(f"rope_scaling = {text!r}: expected 'factor,low,high,tokens', such as Llama 3's '8,1,4,8192'")
    return factor, low, high, tokens


def rotate(x, rope):
    """Apply rotary position embeddings to the pairs (x_j, x_{j + D/2}), as in Hugging Face's Llama.

    x: (..., T, H, D); rope: cos and sin from `rope_table`, which broadcast to (..., T, H, D).
    """
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def at_least_fp32(x):
    """Cast x to fp32, unless it is float64. A log-sum-exp of bf16 logits would be off by 0.06."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mask_padding(logits, n_ids):
    """Set the logits (..., V) of padding ids, from n_ids on, to -inf in place."""
    logits[..., n_ids:] = float('-inf')
    return logits


@outside_graphs  # the compiler would unroll the chunks and keep their logits
def chunked_loss(fn, rows, params, width, shared=()):
    """Sum a loss over the rows of its inputs, holding the logits of one chunk of rows at a time.

    Args:
        fn: fn(*chunk, *shared) -> (loss, *parts), each summed over the chunk's rows
        rows: tensors with one entry per position on their first axis: states, targets, weights, ...
        params: all parameters of the model, for the gradients of those that fn uses
        width: values that fn holds per row, such as the vocabulary size; sets the chunk size
        shared: tensors passed whole to every chunk, such as a table that rows index

    Returns (loss, *parts) in fp32. Gradients are computed chunk by chunk, in the forward pass.
    """
    size = max(1, 2 ** 26 // (256 * width)) * 256
    params = [p for p in params if p.requires_grad]
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(fn, size, len(rows), len(shared), *rows, *shared, *params)
    return _sums([fn(*chunk, *shared) for chunk in zip(*(x.split(size) for x in rows))])


def _sums(parts_of_chunks):
    return tuple(sum(at_least_fp32(x) for x in part) for part in zip(*parts_of_chunks))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, size, n_rows, n_shared, *tensors):
        rows, params = tensors[:n_rows], tensors[n_rows + n_shared:]
        shared = [x.detach().requires_grad_() for x in tensors[n_rows:n_rows + n_shared]]
        params = [*shared, *params]
        needs_grad = [x.requires_grad for x in rows]
        row_grads, param_grads, sums = [[] for _ in rows], [None] * len(params), []
        for chunk in zip(*(x.split(size) for x in rows)):
            chunk = [x.detach().requires_grad_(needed) for x, needed in zip(chunk, needs_grad)]
            with torch.enable_grad():
                total, *parts = fn(*chunk, *shared)
            inputs = [x for x in chunk if x.requires_grad] + params
            grads = list(torch.autograd.grad(total, inputs, allow_unused=True))
            for kept, x in zip(row_grads, chunk):
                if x.requires_grad:
                    grad = grads.pop(0)
                    kept.append(torch.zeros_like(x) if grad is None else grad)
            param_grads = [a if b is None else b if a is None else a.add_(b) for a, b in zip(param_grads, grads)]
            sums.append([x.detach() for x in (total, *parts)])
        ctx.save_for_backward(*(torch.cat(kept) if kept else None for kept in row_grads), *param_grads)
        total, *parts = _sums(sums)
        ctx.mark_non_differentiable(*parts)
        return total, *parts

    @staticmethod
    def backward(ctx, grad, *_):
        return None, None, None, None, *(x if x is None else x * grad for x in ctx.saved_tensors)


# ---- the KV cache ----

class KVCache:
    """KV cache of up to max_tokens tokens per row. Static shapes, so a step can be a CUDA graph.

        for run in cache.runs(tokens, lengths):     usually one run: all new tokens at once
            mask = run.mask()                       shared by all layers
            ... in each layer: k, v = cache.append(layer, k, v); attention(q, k, v, mask)
        last = cache.end(h)                         h of each row's last token
        cache.rollback(n)                           forget the last n tokens

    The cache records the position and stream of each slot's key, and builds masks by the model's
    `sees`. If no query sees a stream further back than r positions, the stream gets a ring buffer
    of r + piece_len slots, else max_tokens slots. rho is stored right to left, before x: the filled
    slots are one range, which is all that a CPU reads. Padding is written to a spare slot:

        [ rho of position 2  1  0 | x of position 0  1  2 ...  | spare ]

    The model provides `sees`, `embed` and a config with sizes, rope_theta and eos_id. max_run: the
    longest run with static shapes and rollback; n_streams: 2 for [x | rho].
    """

    def __init__(self, model, batch_size, max_tokens, max_run=1, device=None, dtype=None, n_streams=1, n_layer=None):
        sees, c, weight = model.sees, model.config, model.embed.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        self.sees, self.head_size, self.max_tokens, self.max_run = sees, c.head_size, max_tokens, max_run
        self.n_streams, self.eos_id = n_streams, c.eos_id
        self.piece_len = max(max_run, 4)  # shorter pieces would make long runs slow
        reaches = [_reach(sees, max_tokens, stream, n_streams, device) for stream in range(n_streams)]
        self.sizes = [min(max_tokens, reach + self.piece_len) for reach in reaches]  # slots of each stream
        self.edge, self.spare = sum(self.sizes[1:]), sum(self.sizes)  # x starts at `edge`, rho ends before it
        shape = (n_layer or c.n_layer, batch_size, c.n_kv_head, self.spare + 1, c.head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.slot_pos = torch.full((batch_size, self.spare + 1), EMPTY_SLOT, device=device)
        self.slot_stream = (torch.arange(self.spare + 1, device=device) < self.edge).long().unsqueeze(0)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = torch.zeros(batch_size, max_tokens + 2, device=device, dtype=torch.int64)  # per position
        self.hidden = torch.zeros(batch_size, max_run, c.n_embd, device=device, dtype=dtype)  # last h of the last call
        self.last = torch.full((batch_size,), -1, device=device)  # index of each row's last token in `hidden`, or -1
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), c.head_size, c.rope_theta, c.rope_scaling)
        self.batch_idx = torch.arange(batch_size, device=device).unsqueeze(1)
        self.run = None  # the current run
        self.drafted = 0  # tokens drafted since the last call or rollback

    @property
    def nbytes(self):
        """Return the bytes of all tensors."""
        return sum(x.nbytes for x in (*vars(self).values(), *self.rope) if isinstance(x, torch.Tensor))

    def runs(self, tokens, lengths=None, piece_len=None):
        """Yield new tokens (B, n) as `Run`s. lengths: (B,) tokens per right-padded row, each >= 1.

        There is one run if n <= max_run or the cache is empty. Longer calls on a cache with a ring
        buffer are split into pieces that fit in it. piece_len sets a shorter length.

        Raises ValueError if a row is full. Runs of n <= max_run are not checked on a GPU, because
        reading the lengths would need a sync.
        """
        n = tokens.shape[1]
        self.n_new = torch.full_like(self.lengths, n) if lengths is None else lengths  # new tokens in this call
        is_long = n > self.max_run
        if is_long or tokens.device.type == 'cpu':
            longest = int((self.lengths + self.n_new).max())
            if longest > self.max_tokens:
                raise ValueError(f'a row of {longest} tokens does not fit a cache of max_tokens = {self.max_tokens}')
        is_prefill = is_long and piece_len is None and not self.lengths.any()
        if piece_len is None:
            has_ring = min(self.sizes) < self.max_tokens
            piece_len = self.piece_len if has_ring and is_long and not is_prefill else n
        for a in range(0, n, piece_len):
            piece = tokens[:, a:a + piece_len]
            self.run = Run(self, piece, (self.n_new - a).clamp(0, piece.shape[1]), is_prefill)
            yield self.run
            self.lengths += self.run.n_new

    def _slots(self, positions, end):
        """Return slots (B, S n) for positions (B, n); positions >= end (B, 1) are padding."""
        slots = []
        for stream, size in enumerate(self.sizes):
            slot = self.edge - 1 - positions % size if stream else self.edge + positions % size
            # only the last `size` tokens get a slot
            slots.append(torch.where((positions < end) & (positions >= end - size), slot, self.spare))
        return torch.cat(slots, 1)

    def used_slots(self, n_streams, end):
        """Return the slots in use after `end` positions (None: all slots), as a slice."""
        x, *rho = (size if end is None else min(size, end) for size in self.sizes[:n_streams])
        return slice(self.edge - sum(rho), self.edge + x)

    def append(self, layer, k, v):
        """Store a run's k and v (B, S n, HK, D), S streams, and return all that it attends to.

        These are the run itself in a prefill, otherwise views of the slots covered by `Run.mask`.
        Calling it again for the same run overwrites the run's entries.
        """
        run = self.run
        k_cache, v_cache = self.k[layer], self.v[layer]
        slots = run.slots[:, :k.shape[1]]
        k_cache[self.batch_idx, :, slots] = k.to(k_cache.dtype)
        v_cache[self.batch_idx, :, slots] = v.to(v_cache.dtype)
        if run.is_prefill:
            return k, v
        used = self.used_slots(k.shape[1] // run.tokens.shape[1], run.end)
        return k_cache[:, :, used].transpose(1, 2), v_cache[:, :, used].transpose(1, 2)

    def tail(self, n):
        """Return indices (B, min(n, max_run)) of each row's last tokens among the call's n."""
        offsets = torch.arange(min(n, self.max_run), device=self.lengths.device)
        return (self.n_new[:, None] - self.max_run).clamp(min=0) + offsets

    def end(self, h):
        """Finish a call: store the last tokens' h (B, n, C), the head's inputs.

        Returns h of each row's last token (B, C).
        """
        tail_idx = self.tail(h.shape[1])
        tail = h[self.batch_idx, tail_idx]
        self.hidden[:, :tail.shape[1]] = tail
        self.last.copy_(self.n_new - 1 - tail_idx[:, 0])
        self.drafted = 0
        return tail[self.batch_idx[:, 0], self.last]

    def rollback(self, n):
        """Forget the last n tokens of the last call. n: int, or (B,) int64 with a count per row."""
        self.lengths -= n
        self.last -= n
        self.drafted = 0


def _reach(sees, n, stream, n_streams, device):
    """Return the longest distance from a query to a key of this stream, over n positions."""
    device = 'cpu' if torch.device(device).type == 'meta' else device
    key, queries = (_sequence(n, streams, device) for streams in ([stream], [*range(n_streams)]))
    step, reach = max(1, 2 ** 22 // n), 0
    for b in range(n, 0, -step):  # from the end, where distances are longest
        if reach < b - 1:
            q = Tokens(*(x.unflatten(1, (n_streams, n))[..., max(0, b - step):b].flatten(1) for x in queries))
            seen = _seen(sees, q, key)[0]
            first = torch.where(seen.any(1), seen.byte().argmax(1), q.pos[0])  # the first key that each query sees
            reach = max(reach, int((q.pos[0] - first).max()))
    return reach


class Run:
    """New tokens of a call and their place in the cache; from `KVCache.runs`.

    tokens, doc_start: (B, n); positions: (B, n) int64, padding is at the position after the row's
    end; rope: cos and sin of [x | rho]; is_prefill: True for a long run on an empty cache.
    """

    def __init__(self, cache, tokens, n_new, is_prefill):
        self.cache, self.tokens, self.n_new, self.is_prefill = cache, tokens, n_new, is_prefill
        end = (cache.lengths + n_new).unsqueeze(1)
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        self.positions = (cache.lengths[:, None] + offsets).minimum(end)
        self.end = int(end.max()) if tokens.device.type == 'cpu' else None
        self.doc_start = self._document_starts()
        self.slots = cache._slots(self.positions, end)
        pos = self.positions.repeat(1, cache.n_streams)
        cache.slot_pos[cache.batch_idx, self.slots] = torch.where(self.slots < cache.spare, pos, EMPTY_SLOT)
        self.rope = tuple(table[pos] for table in cache.rope)

    def _document_starts(self):
        """Return where each token's document starts (B, n), and update the cache's doc_start."""
        cache, positions = self.cache, self.positions
        if cache.eos_id is None:
            return torch.zeros_like(positions)
        is_end = self.tokens == cache.eos_id
        first = cache.doc_start[cache.batch_idx, cache.lengths[:, None]]
        later = torch.where(is_end[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[cache.batch_idx, positions + 1] = torch.where(is_end, positions + 1, doc_start)
        return doc_start

    def mask(self, keys=(0,), queries=None):
        """Return the mask of the run's queries over the keys that `KVCache.append` returns."""
        cache, n, queries = self.cache, self.tokens.shape[1], queries or keys
        if self.is_prefill:
            doc_start = None if cache.eos_id is None else self.doc_start
            if self.tokens.device.type == 'cpu':
                return make_mask(cache.sees, n, cache.head_size, 'cpu', doc_start, keys, queries)
            return Mask('dense', _whole_mask(cache.sees, n, doc_start, keys, queries, self.tokens.device))
        stream = torch.cat([torch.full_like(self.positions, stream) for stream in queries], 1)
        q = Tokens(self.positions.repeat(1, len(queries)), stream, self.doc_start.repeat(1, len(queries)))
        used = cache.used_slots(len(keys), self.end)
        k = Tokens(cache.slot_pos[:, used], cache.slot_stream[:, used])
        return Mask('dense', _seen(cache.sees, q, k))


# ---- digests ----

def digest(*objects):
    """Return a fingerprint of source code, which ignores comments, docstrings and layout."""
    return hashlib.sha256('\n'.join(map(_code, objects)).encode()).hexdigest()[:16]


def _code(x):
    code, starts_statement = '', True
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(inspect.getsource(x))).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        if token.type != tokenize.STRING or not starts_statement:
            code += token.string
        starts_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return code


# ---- Triton kernels (attention='triton') ----
#
# These kernels implement the patterns in TRITON_SEES, for one or two streams. Each stream of keys
# has its own reach, and a query sees one contiguous range of its keys:
#
#     max(doc_start, q.pos - reach) <= k.pos <= q.pos - strict    strict: 1 for x seeing rho, else 0
#
# A program computes one tile of queries, positions i..j of one stream and head. It loops over tiles
# of keys, from the first key of i to the last of j. All queries see the keys between the first of j
# and the last of i, so tiles there need no mask:
#
#     first of i [left: masked] first of j [full tiles] last of i [right: masked] last of j
#
# For dk and dv the roles are swapped: a program owns a tile of keys and loops over queries. No two
# programs add to the same element, so results are deterministic.
#
# q, out: (B, NQ * T, H, D); k, v: (B, NK * T, HK, D), contiguous. lse, delta: (B, H, NQ * T), fp32.
# NQ, NK: number of streams. FIRST: first query stream. GROUP: query heads per key head. Offsets
# across B and T are 64-bit.

TRITON_SEES = ('3e382cfc3b4eff13', '8b701bc9aab89c39')  # digests of `sees` in model_standard.py and model_sps.py
TRITON_TILES = {  # (head size, bits): {result: (queries, keys, warps, stages) of a tile}; no spills on an H100
    (32, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 3), 'dk, dv': (64, 128, 8, 2)},
    (64, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 3), 'dk, dv': (64, 128, 8, 2)},
    (128, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 2), 'dk, dv': (32, 128, 8, 2)},
    (32, 32): {'out': (64, 32, 8, 2), 'dq': (64, 32, 8, 2), 'dk, dv': (32, 32, 8, 1)},
    (64, 32): {'out': (32, 32, 8, 2), 'dq': (32, 32, 8, 2), 'dk, dv': (32, 32, 8, 1)},
    (128, 32): {'out': (32, 16, 8, 1), 'dq': (16, 16, 8, 1), 'dk, dv': (16, 16, 8, 1)},
}


def check_triton(sees, head_size, device):
    """Raise ValueError unless the Triton kernels support this pattern, head size and device."""
    if triton is None or device.type == 'cpu' and not KERNELS_ON_CPU:
        raise ValueError('attention = triton needs a GPU and the package triton: use --attention=auto')
    if head_size not in (32, 64, 128):
        raise ValueError(f'the Triton kernels support head sizes 32, 64 and 128, not {head_size}: use --attention=auto')
    if digest(sees) not in TRITON_SEES:
        raise ValueError(f'`{sees.__qualname__}` has been edited, and the Triton kernels do not implement the edit: '
                         'use --attention=auto')


@jit
def _sees(q_pos, doc_start, k_pos, strict, reach):
    """Return the pattern (SPS paper, eq. 5), elementwise."""
    return (k_pos <= q_pos - strict) & (k_pos >= tl.maximum(doc_start, q_pos - reach))


@jit
def _walk(lo, full_lo, full_hi, hi, BLOCK: constexpr):
    """Return lo and the counts of left-edge, unmasked and right-edge tiles that cover lo..hi."""
    left = tl.cdiv(tl.maximum(tl.minimum(full_lo, hi) - lo, 0), BLOCK)
    full = tl.maximum(full_hi - lo - left * BLOCK, 0) // BLOCK
    right = tl.cdiv(tl.maximum(hi - lo - (left + full) * BLOCK, 0), BLOCK)
    return lo, left, full, right


@jit
def _walk_keys(i, j, doc_start, strict, reach, BLOCK: constexpr):
    """Return `_walk` over one stream's keys for queries i..j. doc_start: of this batch row."""
    first_of_i = tl.maximum(tl.load(doc_start + i).to(tl.int32), i - reach)
    first_of_j = tl.maximum(tl.load(doc_start + j).to(tl.int32), j - reach)
    end = tl.where(strict > reach, first_of_i, j + 1 - strict)  # x sees no rho if its reach is 0
    return _walk(first_of_i, first_of_j, i + 1 - strict, end, BLOCK)


@jit
def _tile_count(walk, FULL: constexpr):
    return walk[2] if FULL else walk[1] + walk[3]


@jit
def _tile_start(walk, i, FULL: constexpr, BLOCK: constexpr):
    """Return the first position of the i-th full or masked tile of a walk."""
    lo, left, full, _ = walk
    return lo + (i + (left if FULL else tl.where(i < left, 0, full))) * BLOCK


@jit
def _head(b, stream, h, n_streams, T, H, D):
    """Return the offset of a head's position 0 in (B, n_streams * T, H, D). b is 64-bit."""
    return ((b * n_streams + stream) * T * H + h) * D


@jit
def _pointers(x, start, H, D: constexpr, BLOCK: constexpr):
    """Return pointers (BLOCK, D) to positions start..start + BLOCK of the head at x."""
    return x + tl.cast(start, tl.int64) * H * D + tl.arange(0, BLOCK)[:, None] * H * D + tl.arange(0, D)[None, :]


@jit
def _load(x, start, T, H, D: constexpr, BLOCK: constexpr, FULL: constexpr):
    """Load (BLOCK, D) at positions start..start + BLOCK; unless FULL, zeros from position T on."""
    if FULL:
        return tl.load(_pointers(x, start, H, D, BLOCK))
    return tl.load(_pointers(x, start, H, D, BLOCK), mask=(start + tl.arange(0, BLOCK) < T)[:, None], other=0.0)


@jit
def _load_scalars(x, pos, T, other, FULL: constexpr):
    """Load one value per position; unless FULL, `other` from position T on."""
    return tl.load(x + pos) if FULL else tl.load(x + pos, mask=pos < T, other=other)


@jit
def _store(x, start, T, H, tile, D: constexpr, BLOCK: constexpr):
    pointers = _pointers(x, start, H, D, BLOCK)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(start + tl.arange(0, BLOCK) < T)[:, None])


@jit
def _query_tile(T, H, NQ: constexpr, BLOCK: constexpr):
    """Return this program's batch row, head, stream index, first and last query position."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # start with the last positions: they see the most keys
    first = tile // NQ * BLOCK
    return b, h, tile % NQ, first, tl.minimum(first + BLOCK, T) - 1


@jit
def _scores(q_tile, k_tile, q_pos, start, n, strict, reach, BLOCK_K: constexpr, FULL: constexpr):
    """Return unscaled scores (queries, keys), -inf where the query does not see the key."""
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision='ieee')
    if not FULL:
        k_pos = n + tl.arange(0, BLOCK_K)
        seen = _sees(q_pos[:, None], start[:, None], k_pos[None, :], strict, reach)
        s = tl.where(seen, s, float('-inf'))
    return s


@jit
def _forward_kernel(q, k, v, doc_start, out, lse, reach_x, reach_rho, T, H, scale, GROUP: constexpr, NQ: constexpr,
                    NK: constexpr, FIRST: constexpr, D: constexpr, BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute out, and lse: the log-sum-exp of each query's scores, in base 2."""
    b, h, part, first, last = _query_tile(T, H, NQ, BLOCK_Q)
    HK, doc_start, scale = H // GROUP, doc_start + b * T, scale * 1.4426950408889634  # log2(e): softmax in base 2
    q_pos = first + tl.arange(0, BLOCK_Q)
    start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
    head = _head(b, part, h, NQ, T, H, D)
    q_tile = _load(q + head, first, T, H, D, BLOCK_Q, False)

    m = tl.full((BLOCK_Q,), -1e30, tl.float32)  # running maximum; finite because a query may see no key of a tile
    l = tl.zeros((BLOCK_Q,), tl.float32)  # running sum
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for k_stream in tl.static_range(NK):
        reach = reach_x if k_stream == 0 else reach_rho
        strict = tl.where(k_stream > FIRST + part, 1, 0)
        k_head = _head(b, k_stream, h // GROUP, NK, T, HK, D)
        walk = _walk_keys(first, last, doc_start, strict, reach, BLOCK_K)
        for FULL in tl.static_range(2):
            for i in range(_tile_count(walk, FULL)):
                n = _tile_start(walk, i, FULL, BLOCK_K)
                k_tile = _load(k + k_head, n, T, HK, D, BLOCK_K, FULL)
                v_tile = _load(v + k_head, n, T, HK, D, BLOCK_K, FULL)
                s = _scores(q_tile, k_tile, q_pos, start, n, strict, reach, BLOCK_K, FULL)
                m_new = tl.maximum(m, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - m_new[:, None])
                shrink = tl.exp2(m - m_new)
                m, l = m_new, l * shrink + tl.sum(p, 1)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision='ieee')
    l = tl.where(q_pos < T, l, 1.0)
    _store(out + head, first, T, H, acc / l[:, None], D, BLOCK_Q)
    tl.store(lse + ((b * H + h) * NQ + part) * T + q_pos, m + tl.log2(l), mask=q_pos < T)


@jit
def _query_gradient_kernel(q, k, v, doc_start, out, lse, grad, delta, dq, reach_x, reach_rho, T, H, scale,
                           GROUP: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr,
                           BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute dq, and delta = (out * grad).sum(-1) for `_key_gradient_kernel`."""
    b, h, part, first, last = _query_tile(T, H, NQ, BLOCK_Q)
    HK, doc_start = H // GROUP, doc_start + b * T
    q_pos = first + tl.arange(0, BLOCK_Q)
    start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
    head = _head(b, part, h, NQ, T, H, D)
    q_tile = _load(q + head, first, T, H, D, BLOCK_Q, False)
    out_tile = _load(out + head, first, T, H, D, BLOCK_Q, False)
    grad_tile = _load(grad + head, first, T, H, D, BLOCK_Q, False)
    row = ((b * H + h) * NQ + part) * T
    q_lse = _load_scalars(lse + row, q_pos, T, float('inf'), False)
    q_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta + row + q_pos, q_delta, mask=q_pos < T)

    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for k_stream in tl.static_range(NK):
        reach = reach_x if k_stream == 0 else reach_rho
        strict = tl.where(k_stream > FIRST + part, 1, 0)
        k_head = _head(b, k_stream, h // GROUP, NK, T, HK, D)
        walk = _walk_keys(first, last, doc_start, strict, reach, BLOCK_K)
        for FULL in tl.static_range(2):
            for i in range(_tile_count(walk, FULL)):
                n = _tile_start(walk, i, FULL, BLOCK_K)
                k_tile = _load(k + k_head, n, T, HK, D, BLOCK_K, FULL)
                v_tile = _load(v + k_head, n, T, HK, D, BLOCK_K, FULL)
                s = _scores(q_tile, k_tile, q_pos, start, n, strict, reach, BLOCK_K, FULL)
                p = tl.exp2(s * (scale * 1.4426950408889634) - q_lse[:, None])
                dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision='ieee')
                ds = p * (dp - q_delta[:, None])
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision='ieee')
    _store(dq + head, first, T, H, acc * scale, D, BLOCK_Q)


@jit
def _key_gradient_kernel(q, k, v, doc_start, doc_end, lse, grad, delta, dk, dv, reach_x, reach_rho, T, H, scale,
                         GROUP: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr,
                         BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute dk and dv of a tile of keys, summed over its query heads and query streams.

    doc_end[b, t]: the first position whose document starts after t.
    """
    HK = H // GROUP
    b, h = (tl.program_id(0) // HK).to(tl.int64), tl.program_id(0) % HK
    k_stream, first = tl.program_id(1) % NK, tl.program_id(1) // NK * BLOCK_K
    last = tl.minimum(first + BLOCK_K, T) - 1
    doc_start, doc_end = doc_start + b * T, doc_end + b * T
    reach = tl.where(k_stream == 0, reach_x, reach_rho)
    end_of_first = tl.minimum(tl.load(doc_end + first).to(tl.int32), first + reach + 1)  # queries before it see `first`
    end_of_last = tl.minimum(tl.load(doc_end + last).to(tl.int32), last + reach + 1)
    k_pos = first + tl.arange(0, BLOCK_K)
    k_head = _head(b, k_stream, h, NK, T, HK, D)
    k_tile = _load(k + k_head, first, T, HK, D, BLOCK_K, False)
    v_tile = _load(v + k_head, first, T, HK, D, BLOCK_K, False)

    dk_acc = tl.zeros((BLOCK_K, D), tl.float32)
    dv_acc = tl.zeros((BLOCK_K, D), tl.float32)
    for q_h in range(h * GROUP, (h + 1) * GROUP):
        for part in range(NQ):
            head, row = _head(b, part, q_h, NQ, T, H, D), ((b * H + q_h) * NQ + part) * T
            strict = tl.where(k_stream > FIRST + part, 1, 0)
            end = tl.where(strict > reach, first, end_of_last)
            walk = _walk(first + strict, last + strict, end_of_first, end, BLOCK_Q)
            for FULL in tl.static_range(2):
                for i in range(_tile_count(walk, FULL)):
                    n = _tile_start(walk, i, FULL, BLOCK_Q)
                    q_pos = n + tl.arange(0, BLOCK_Q)
                    q_tile = _load(q + head, n, T, H, D, BLOCK_Q, FULL)
                    grad_tile = _load(grad + head, n, T, H, D, BLOCK_Q, FULL)
                    q_lse = _load_scalars(lse + row, q_pos, T, float('inf'), FULL)
                    q_delta = _load_scalars(delta + row, q_pos, T, 0.0, FULL)
                    s = tl.dot(k_tile, tl.trans(q_tile), input_precision='ieee')  # (keys, queries)
                    if not FULL:
                        start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
                        seen = _sees(q_pos[None, :], start[None, :], k_pos[:, None], strict, reach)
                        s = tl.where(seen, s, float('-inf'))
                    p = tl.exp2(s * (scale * 1.4426950408889634) - q_lse[None, :])
                    dv_acc = tl.dot(p.to(grad_tile.dtype), grad_tile, dv_acc, input_precision='ieee')
                    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision='ieee')
                    ds = p * (dp - q_delta[None, :])
                    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision='ieee')
    _store(dk + k_head, first, T, HK, dk_acc * scale, D, BLOCK_K)
    _store(dv + k_head, first, T, HK, dv_acc, D, BLOCK_K)


def _launch(kernel, result, tensors, pattern):
    """Launch a kernel over all heads and tiles: tiles of keys for 'dk, dv', otherwise of queries.

    pattern: reach of x keys, reach of rho keys, first query stream.
    """
    q, k, _, doc_start, *_ = tensors
    (B, _, H, D), HK, T, (reach_x, reach_rho, first) = q.shape, k.shape[2], doc_start.shape[1], pattern
    NQ, NK = q.shape[1] // T, k.shape[1] // T
    block_q, block_k, warps, stages = TRITON_TILES[D, 8 * q.element_size()][result]
    grid = (B * HK, NK * triton.cdiv(T, block_k)) if result == 'dk, dv' else (B * H, NQ * triton.cdiv(T, block_q))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[grid](*tensors, reach_x, reach_rho, T, H, D ** -0.5, H // HK, NQ, NK, first, D, block_q, block_k,
                     num_warps=warps, num_stages=stages)


def _empty_outputs(q, *_):
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_start: torch.Tensor,
             pattern: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty_outputs(q)
    _launch(_forward_kernel, 'out', (q, k, v, doc_start, out, lse), pattern)
    return out, lse


def _empty_gradients(_, q, k, v, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_start: torch.Tensor,
              out: torch.Tensor, lse: torch.Tensor,
              pattern: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (dq, dk, dv), delta = _empty_gradients(grad, q, k, v), torch.empty_like(lse)
    position = torch.arange(doc_start.shape[1], device=q.device).expand_as(doc_start).contiguous()
    doc_end = torch.searchsorted(doc_start, position, right=True)
    _launch(_query_gradient_kernel, 'dq', (q, k, v, doc_start, out, lse, grad, delta, dq), pattern)
    _launch(_key_gradient_kernel, 'dk, dv', (q, k, v, doc_start, doc_end, lse, grad, delta, dk, dv), pattern)
    return dq, dk, dv


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.pattern = inputs
    ctx.save_for_backward(*tensors, *output)


def _call_backward(ctx, grad, _):
    return *_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.pattern), None, None


_NAMESPACE = __name__.replace('.', '_')  # separate operators for copies of this file, as in exported folders
_forward_op = torch.library.custom_op(f'{_NAMESPACE}::triton_attention', _forward, mutates_args=())
_backward_op = torch.library.custom_op(f'{_NAMESPACE}::triton_attention_backward', _backward, mutates_args=())
_forward_op.register_fake(_empty_outputs)
_backward_op.register_fake(_empty_gradients)
_forward_op.register_autograd(_call_backward, setup_context=_save_for_backward)


def triton_attention(q, k, v, doc_start, reaches, T, first=0):
    """Compute attention with the Triton kernels, for the patterns in TRITON_SEES.

    Args:
        q: (B, NQ * T, H, D) in fp32, fp16 or bf16, D = 32, 64 or 128
        k, v: (B, NK * T, HK, D)
        doc_start: (B, T) int64 from `document_starts`, or None for one document
        reaches: for each key stream, the number of past positions that a query sees; 2**30 for all
        first: the first query stream, 0 for x, 1 for rho

    Returns (B, NQ * T, H, D).
    """
    if doc_start is None:
        doc_start = torch.zeros(q.shape[0], T, dtype=torch.int64, device=q.device)
    pattern = [min(reaches[0], T), min(reaches[-1], T), first]
    return _forward_op(*(x.contiguous() for x in (q, k, v, doc_start)), pattern)[0]
