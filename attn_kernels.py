"""What all models share: attention, decoding over a cache, rotary positions, norms and losses.

Each has a plain form that defines it, `..._reference`, `_rms_norm` and `_rotate`, and one that is fast. In this order:

    patterns        document_starts, visible, attention, two_stream_attention, slot_attention
    Triton          the attention kernels, forward and backward, and the kernel that decodes
    layers          rms_norm, rope_table, rotate
    losses          linear_cross_entropy, linear_cross_entropy_kl: without holding all logits
    KVCache, Place  what `extend` keeps of the tokens it has read
    choose_scan     a model's equations or their fast form in scans/, by comparing both

A pattern says which keys a query sees. Here it is causal, cut at document starts, and optionally limited to a window:

    query t sees key k   iff   max(doc_start[t], t - window) <= k <= t

      k  0 1 2 3 4 5 6 7                      k  0 1 2 3 4 5 6 7
    t 0  #                 doc_start = 0    t 0  #                 window = 2: itself
      1  # #                           0      1  # #               and the two before it
      2  # # #                         0      2  # # #
      3        #                       3      3    . # #           '.' = outside the
      4        # #                     3      4        # #             window
      5        # # #                   3      5        # # #
      6        # # # #                 3      6        . # # #
      7        # # # # #               3      7        . . # # #

A document is a range of keys, never an id per key: `doc_start[b, t]` is the position where t's document starts and does
not decrease in t, so a block of queries [i, j) needs only the keys from doc_start[i] on.

Two streams x and rho, one vector of each per position, have one such pattern for each stream's keys: here x persists
(all of the past) and rho is windowed (window = 2). Only the diagonal knows which stream asks: x comes before rho, so
x_t does not see rho_t.

      k  x: 0 1 2 3 4 5   rho: 0 1 2 3 4 5
    t 0     #                  o                 '#' both x_t and rho_t see it
      1     # #                # o               'o' rho_t alone
      2     # # #              # # o
      3     # # # #            . # # o
      4     # # # # #          . . # # o
      5     # # # # # #        . . . # # o

The streams stay apart in memory: a tile of queries of both reads a triangle of one stream's keys and a short band of
the other's.

A GPU runs the Triton kernels, a CPU PyTorch's operators, in tiles where these skip keys. One stream without documents
or a window is PyTorch's own causal attention, but for a CPU on which tiles are faster (`tiles_in_bf16`). In the
environment, ATTENTION=reference makes every pattern its definition, and TRITON_INTERPRET=1 runs the kernels in Triton's
interpreter on CPU.

To change the pattern, edit `visible` or `two_stream_visible`. Before training and decoding the fast forms are compared
with these (common/kernel_check.py); where they differ, the definition runs, slower. To be fast again, the same edit
belongs where the fast forms have the pattern as ranges of keys: in PyTorch `attention` (`plain`) and `_tiles`; in
Triton `_key_walk` and `_mask` (forward, dq), `_key_gradient_kernel` and `_key_gradient_tile` (dk, dv), and
`_decode_kernel`. `KVCache` holds in its ring what the windows reach, and `Place._filled` reads no more of the memory: a
pattern that sees further needs more there.

Keys and values may have fewer heads than queries have (grouped queries): with HK of them, query head h reads key head
h // (H / HK).

B batch, T positions, H heads, HK key heads, D head size, S slots of a cache, n positions of a call, N rows, C width, V
vocabulary.
"""
import functools
import importlib.util
import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # no Triton for this platform: the PyTorch forms remain
    triton = tl = constexpr = None
    jit = lambda kernel: kernel

REFERENCE = os.environ.get('ATTENTION') == 'reference'  # every pattern as its definition
KERNELS_ON_CPU = os.environ.get('TRITON_INTERPRET') == '1'  # Triton's interpreter: slow, for tests
# Of 'attention', 'decoding', 'loss', 'norm', 'rotation': what common/kernel_check.py found to differ from its
# definition. PyTorch's operators do these instead.
refused = set()
# Up to this T, attention in tiles keeps its probabilities for the backward: faster (bench/attention_cpu.py), but T^2
# memory.
DENSE_T = 1024
# On a CPU in bf16, where PyTorch's fused attention would do too: whether attention goes in tiles, and whether a cache
# is read by plain products. common/cpu_forms.py sets both to what is faster on the machine at hand.
tiles_in_bf16 = products_over_slots = True
QUERY_ROWS = 128  # of a tile on CPU, those of both streams: few enough to skip most of the upper triangle


def document_starts(idx, eos_id):
    """Where the document of each position starts. idx (B, T) int64 -> (B, T) int64, or None if eos_id is None.

    `eos` belongs to the document that it ends; the window's first token starts a document.
    """
    if eos_id is None:
        return None
    position = torch.arange(idx.shape[1], device=idx.device).expand_as(idx)
    starts = F.pad(idx[:, :-1] == eos_id, (1, 0))
    return torch.where(starts, position, 0).cummax(1).values


def visible(query_pos, key_pos, doc_start=None, window=None):
    """The pattern as booleans. query_pos (..., n), key_pos (..., S), doc_start (..., n) -> (..., n, S)."""
    query_pos, key_pos = query_pos.unsqueeze(-1), key_pos.unsqueeze(-2)
    mask = key_pos <= query_pos
    if window is not None:
        mask = mask & (key_pos >= query_pos - window)
    if doc_start is not None:
        mask = mask & (key_pos >= doc_start.unsqueeze(-1))
    return mask


def each_head(x, n_head):
    """Keys or values (..., HK, D) as n_head query heads read them: (..., n_head, D)."""
    return x if x.shape[-2] == n_head else x.repeat_interleave(n_head // x.shape[-2], -2)


def attention_reference(q, k, v, doc_start=None, window=None):
    """`attention` as its definition: dense scores, mask, softmax. Exact in float64, for tests and for reading."""
    position = torch.arange(q.shape[1], device=q.device)
    return _dense_attention(q, k, v, visible(position, position, doc_start, window))


def _dense_attention(q, k, v, mask):
    """What every reference of attention is. q (B, n, H, D); k, v (B, S, HK, D); mask (..., n, S), true where seen."""
    k, v = (each_head(x, q.shape[-2]) for x in (k, v))
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask.unsqueeze(-3), float('-inf'))
    return torch.einsum('bhqk,bkhd->bqhd', scores.softmax(-1), v)


def attention(q, k, v, doc_start=None, window=None):
    """softmax(q k^T / sqrt(D)) v over the keys max(doc_start[t], t - window) <= k <= t.

    q (B, T, H, D); k, v (B, T, HK, D); doc_start (B, T) int64 from `document_starts`, None for one document; window in
    positions, None for all. Returns (B, T, H, D).
    """
    T = q.shape[1]
    plain = doc_start is None and (window is None or window >= T - 1)
    if REFERENCE:
        return attention_reference(q, k, v, doc_start, window)
    if use_triton(q) and not (plain and q.is_cuda):
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return _kernel_attention(q, k, v, doc_start, [window, None], 0).squeeze(1)
    k, v = (each_head(x, q.shape[2]) for x in (k, v))
    dense = q.dtype == torch.bfloat16 and T <= DENSE_T and (tiles_in_bf16 or not plain)
    if q.device.type == 'cpu' and (dense or not plain and T > 2 * QUERY_ROWS):  # else tiles skip nothing
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return _tiled_attention(q, k, v, [window], doc_start, 'input').squeeze(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # PyTorch's attention wants (B, H, T, D)
    mask = None if plain else _once_a_step(_full_mask, doc_start, T, window, q.dtype, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain).transpose(1, 2)


def _once_a_step(make, doc_start, *args):
    """make(doc_start, *args), once for all layers of a step: they share doc_start, and what is made is kept on it."""
    if doc_start is None or torch.compiler.is_compiling():
        return make(doc_start, *args)
    made, key = vars(doc_start).setdefault('made', {}), (make, *args)
    if key not in made:
        made[key] = make(doc_start, *args)
    return made[key]


def _full_mask(doc_start, T, window, dtype, device):
    """Of all queries and keys, as `_additive_mask` makes it."""
    position = torch.arange(T, device=device)
    return _additive_mask(visible(position, position, doc_start, window), dtype)


def _additive_mask(seen, dtype):
    """What is added to scores, for all heads the same: seen (..., n, S) -> (..., 1, n, S), 0 where seen, else -inf."""
    seen = seen.unsqueeze(-3)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float('-inf'))


def _tiles(doc_start, T, windows, queries, dtype, device):
    """[(queries, keys of each stream, mask)]: slices of positions, and what is added to their scores."""
    on_cpu = device.type == 'cpu'
    step = QUERY_ROWS // len(STREAMS[queries]) if on_cpu else 512
    position = torch.arange(T, device=device)
    tiles = []
    for a in range(0, T, step):
        b = min(a + step, T)
        document = 0
        if on_cpu and doc_start is not None and a > 0:  # elsewhere it would wait for the device
            document = int(doc_start[:, a].min())
        keys = [slice(max(document, 0 if w is None else a - w), b) for w in windows]
        doc = None if doc_start is None else doc_start[:, a:b]
        if len(windows) == 1:
            seen = visible(position[a:b], position[keys[0]], doc, windows[0])
        else:
            seen = two_stream_visible(position[a:b], position[keys[0]], position[keys[1]], windows, doc, queries)
        tiles.append((slice(a, b), keys, _additive_mask(seen, dtype)))
    return tiles


def outside_graphs(function):
    """As torch.compiler.disable, which imports the compiler at once: a second of every start."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)
    return call


def checkpointed(forward):
    """Of a module's method: where self.checkpoints, training keeps its arguments alone, and runs it again backward.

    Inside the module: FSDP's hooks on its call would otherwise run under the checkpoint, which a compiler leaves out.
    """
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if self.checkpoints and self.training:
            return checkpoint(functools.partial(forward, self), *args, use_reentrant=False, **kwargs)
        return forward(self, *args, **kwargs)
    return call


@outside_graphs  # a compiler would unroll the tiles of all layers, and take minutes
def _tiled_attention(q, k, v, windows, doc_start, queries):
    """Attention by dense products: tile by tile, queries with the keys that one of them sees at least.

    q (B, 1 or 2, T, H, D) of the streams `queries`; k, v (B, 1 or 2, T, H, D) and a window for each of their streams.
    """
    return _TiledAttention.apply(q, k, v, _once_a_step(_tiles, doc_start, q.shape[2], tuple(windows), queries, q.dtype,
                                                       q.device))


class _TiledAttention(torch.autograd.Function):
    """Its gradients of keys and values grow in place; autograd would fill one of all positions for each tile."""

    @staticmethod
    def forward(ctx, q, k, v, tiles):
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (x.transpose(2, 3).contiguous() for x in (q * q.shape[-1] ** -0.5, k, v))
            out, saved = torch.empty_like(q), []  # (B, streams, H, T, D)
            for tile in tiles:
                q_tile, k_tile, v_tile = _rows_of_tile(q, k, v, tile)
                p = _probabilities(q_tile, k_tile, tile)
                out[:, :, :, tile[0]] = (p @ v_tile).unflatten(2, (q.shape[1], -1)).transpose(1, 2)
                if any(ctx.needs_input_grad) and q.shape[3] <= DENSE_T:
                    saved.append(p)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.tiles = tiles
        return out.transpose(2, 3)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *saved = ctx.saved_tensors
        grad = grad.transpose(2, 3)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i, tile in enumerate(ctx.tiles):
            q_tile, k_tile, v_tile = _rows_of_tile(q, k, v, tile)
            p = saved[i] if saved else _probabilities(q_tile, k_tile, tile)
            rows, keys, _ = tile
            grad_tile = grad[:, :, :, rows].transpose(1, 2).flatten(2, 3)
            dp = grad_tile @ v_tile.transpose(-2, -1)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, :, :, rows] = (ds @ k_tile).unflatten(2, (q.shape[1], -1)).transpose(1, 2)
            for dx, part in (dk, ds.transpose(-2, -1) @ q_tile), (dv, p.transpose(-2, -1) @ grad_tile):
                for stream, of_stream in enumerate(part.split([seen.stop - seen.start for seen in keys], 2)):
                    dx[:, stream, :, keys[stream]] += of_stream
        return dq.mul_(q.shape[-1] ** -0.5).transpose(2, 3), dk.transpose(2, 3), dv.transpose(2, 3), None


def _rows_of_tile(q, k, v, tile):
    """Queries (B, H, rows, D) and keys and values (B, H, keys, D) of a tile, those of all streams one after another."""
    rows, keys, _ = tile
    k, v = (torch.cat([x[:, stream, :, seen] for stream, seen in enumerate(keys)], 2) for x in (k, v))
    return q[:, :, :, rows].transpose(1, 2).flatten(2, 3), k, v


def _probabilities(q, k, tile):
    return (q @ k.transpose(-2, -1)).add_(tile[2]).softmax(-1)


def slot_attention(q, k, v, mask):
    """Attention over the slots of a cache, in its dtype.

    q (B, n, H, D); k, v (B, HK, S, D); mask (B, n, S), true where seen. Returns (B, n, H, D).
    """
    if REFERENCE:
        return _dense_attention(q.to(k.dtype), k.transpose(1, 2), v.transpose(1, 2), mask).to(q.dtype)
    out_dtype, n, group = q.dtype, q.shape[1], q.shape[2] // k.shape[1]
    # the queries of all heads that read a key head are rows of one product
    q = q.to(k.dtype).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = (mask if group == 1 else mask.repeat(1, group, 1)).unsqueeze(1)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16 and q.shape[2] <= 64 and products_over_slots:
        # k q^T reads the keys in order, q k^T does not
        scores = (k @ (q * q.shape[-1] ** -0.5).transpose(-2, -1)).transpose(-2, -1)
        out = torch.where(mask, scores, float('-inf')).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    return out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(out_dtype)


STREAMS = {'input': [0], 'predict': [1], 'both': [0, 1]}  # x is stream 0, rho stream 1


def stream_windows(persistent, window, persistent_window=None):
    """[window of the x keys, window of the rho keys], None for all: persistent is 'input', 'predict' or 'both'."""
    return [persistent_window if stream in STREAMS[persistent] else window for stream in (0, 1)]


def two_stream_visible(query_pos, x_pos, rho_pos, windows, doc_start=None, queries='both'):
    """The pattern of two streams as booleans: a row for each query, those of x first, over [x keys | rho keys].

    query_pos, doc_start (..., n); x_pos (..., S), rho_pos (..., R): positions of the keys; windows from
    `stream_windows`. Returns (..., n or 2n, S + R).
    """
    x_keys = visible(query_pos, x_pos, doc_start, windows[0])
    rho_keys = visible(query_pos, rho_pos, doc_start, windows[1])
    earlier = rho_pos.unsqueeze(-2) < query_pos.unsqueeze(-1)  # x_t comes before rho_t
    rows = [torch.cat([x_keys, rho_keys & earlier if stream == 0 else rho_keys], -1) for stream in STREAMS[queries]]
    return torch.cat(rows, -2)


def two_stream_attention_reference(q, k, v, windows, doc_start=None, queries='both'):
    """`two_stream_attention` as its definition: one softmax over all keys of both streams. Exact in float64."""
    position = torch.arange(q.shape[2], device=q.device)
    mask = two_stream_visible(position, position, position, windows, doc_start, queries)
    return _dense_attention(*(x.flatten(1, 2) for x in (q, k, v)), mask).view_as(q)


def two_stream_attention(q, k, v, windows, doc_start=None, queries='both'):
    """Attention of two streams over the keys of both; SPS paper, eq. 5, with windows = [None, w].

    Position t sees x_j for j <= t and rho_j for j <= t, but x_t not rho_t; of a stream with a window only
    j >= t - window; nothing before doc_start[t].

    k, v (B, 2, T, HK, D), stream 0 = x (input), 1 = rho (predict). q (B, 2, T, H, D), or (B, 1, T, H, D) of the one
    stream that queries = 'input' or 'predict' names. Or x alone: one stream each, and queries = 'input'. windows: those
    of the x keys and of the rho keys, in positions, None for all (`stream_windows`); doc_start (B, T) int64. Returns
    the shape of q.
    """
    if q.shape[1] != len(STREAMS[queries]):
        raise ValueError(f"q has {q.shape[1]} streams and queries = {queries!r}: expected 2 with 'both', "
                         "1 with 'input' or 'predict'")
    if k.shape[1] == 1:  # x alone, in layers without rho
        return attention(q[:, 0], k[:, 0], v[:, 0], doc_start, windows[0]).unsqueeze(1)
    if REFERENCE:
        return two_stream_attention_reference(q, k, v, windows, doc_start, queries)
    if use_triton(q):
        return _kernel_attention(q, k, v, doc_start, windows, STREAMS[queries][0])
    k, v = (each_head(x, q.shape[3]) for x in (k, v))
    return _tiled_attention(q, k, v, windows, doc_start, queries)


# ---- attention in Triton: every pattern is a range of keys per query ----
#
# A tile of queries holds rows of one or of both streams, positions a..b of each, so that both share each load of keys.
# Of a key stream with window w it sees one unbroken range, and walks it in tiles from its very first key:
#
#     lo = max(doc_start[a], a - w)                                 hi = b + 1
#      |  left: some rows see less  |  full: no mask  |  right: the diagonal  |
#                max(doc_start[b], b - w)           a + 1
#
# Tiles outside lo..hi are never loaded. The keys' gradient walks the queries c .. min(doc_end[d], d + w + 1) in the
# same way. exp2 is used throughout: log-sum-exps are kept in base 2, with the scale 1 / sqrt(D) in them. Column blocks
# of D0 and D1 make up a head, so that a head of 70 costs 64 + 16 columns rather than 128.

@jit
def _tile_walk(lo, full_lo, full_hi, hi, N: constexpr):
    """Tiles of N that cover lo..hi: the number left of the full ones, of full ones, and right of them."""
    left = tl.cdiv(tl.minimum(tl.maximum(full_lo - lo, 0), tl.maximum(hi - lo, 0)), N)
    full = tl.maximum(full_hi - (lo + left * N), 0) // N
    return left, full, tl.cdiv(tl.maximum(hi - (lo + (left + full) * N), 0), N)


@jit
def _key_walk(a, b, start_a, start_b, window, strict_some: constexpr, strict_all: constexpr, N: constexpr):
    """Where queries a..b begin in the keys of a stream, and their `_tile_walk`. strict: none sees its own position."""
    lo = tl.maximum(start_a, a - window)
    left, full, right = _tile_walk(lo, tl.maximum(start_b, b - window), a + 1 - strict_some, b + 1 - strict_all, N)
    return lo, left, full, right


@jit
def _columns(x, rows, first: constexpr, width: constexpr):
    return x + rows[:, None] + (first + tl.arange(0, width))[None, :]


@jit
def _in_head(seen, first: constexpr, width: constexpr, D: constexpr):
    return seen[:, None] & (first + tl.arange(0, width) < D)[None, :]


@jit
def _load_columns(x, rows, seen, first: constexpr, width: constexpr, D: constexpr, MASKED: constexpr):
    if MASKED or first + width > D:
        return tl.load(_columns(x, rows, first, width), mask=_in_head(seen, first, width, D), other=0.0)
    return tl.load(_columns(x, rows, first, width))


@jit
def _load(x, rows, seen, D: constexpr, D0: constexpr, D1: constexpr, MASKED: constexpr):
    """Both column blocks of the heads at offsets `rows` from x; zeros where `seen` is false, if MASKED."""
    x0 = _load_columns(x, rows, seen, 0, D0, D, MASKED)
    return x0, x0 if D1 == 0 else _load_columns(x, rows, seen, D0, D1, D, MASKED)


@jit
def _store(x, rows, seen, y0, y1, D: constexpr, D0: constexpr, D1: constexpr):
    tl.store(_columns(x, rows, 0, D0), y0.to(x.dtype.element_ty), mask=_in_head(seen, 0, D0, D))
    if D1 > 0:
        tl.store(_columns(x, rows, D0, D1), y1.to(x.dtype.element_ty), mask=_in_head(seen, D0, D1, D))


@jit
def _at(x, strides, b, h, stream, position, A: constexpr):
    """Where a stream's head at a position begins. Strides are multiples of A. In 64 bits, as a tensor may pass 2^31."""
    position = tl.cast(position, tl.int64)
    return x + tl.multiple_of(b * strides[0] + stream * strides[1] + position * strides[2] + h * strides[3], A)


@jit
def _rows(strides, stream, position, A: constexpr):
    """Offsets of rows of a tile from its first."""
    return tl.multiple_of(stream * strides[1] + position * strides[2], [A])


@jit
def _products(x0, x1, y0, y1, D1: constexpr):
    """x y^T over all columns of a head."""
    s = tl.dot(x0, tl.trans(y0), input_precision='ieee')
    if D1 > 0:
        s = tl.dot(x1, tl.trans(y1), s, input_precision='ieee')
    return s


@jit
def _add_products(acc0, acc1, p, y0, y1, D1: constexpr):
    """acc + p y, for both blocks of columns."""
    acc0 = tl.dot(p.to(y0.dtype), y0, acc0, input_precision='ieee')
    if D1 > 0:
        acc1 = tl.dot(p.to(y0.dtype), y1, acc1, input_precision='ieee')
    return acc0, acc1


@jit
def _query_tile(doc_start, b, first, T, windows, NQ: constexpr, NK: constexpr, FIRST: constexpr, N: constexpr,
                M: constexpr):
    """`_key_walk` of N query positions from `first` on over each stream of keys, in tiles of M."""
    last = tl.minimum(first + N, T) - 1
    start_first, start_last = 0, 0
    if doc_start is not None:
        start_first = tl.load(doc_start + b * T + first).to(tl.int32)
        start_last = tl.load(doc_start + b * T + last).to(tl.int32)
    x = _key_walk(first, last, start_first, start_last, windows[0], 0, 0, M)
    rho = (0, 0, 0, 0)
    if NK == 2:
        rho = _key_walk(first, last, start_first, start_last, windows[1], 1 - FIRST, (1 - FIRST) * (2 - NQ), M)
    return x, rho


@jit
def _walked_tile(i, x, rho, NK: constexpr, M: constexpr, FULL: constexpr):
    """The i-th full or masked tile of the walks over NK streams: its stream and first key."""
    stream = 0
    lo, left, full = x[0], x[1], x[2]
    if NK == 2:
        if FULL:
            of_x = x[2]
        else:
            of_x = x[1] + x[3]
        stream = (i >= of_x).to(tl.int32)
        i = i - stream * of_x
        lo = tl.where(stream == 0, x[0], rho[0])
        left = tl.where(stream == 0, x[1], rho[1])
        full = tl.where(stream == 0, x[2], rho[2])
    if FULL:
        i += left
    else:
        i += tl.where(i >= left, full, 0)
    return stream, lo + i * M


@jit
def _mask(s, position, stream, key, key_stream, start, windows):
    """Scores of keys that a query does not see become -inf."""
    window = tl.where(key_stream == 0, windows[0], windows[1])
    last = tl.where((stream == 0) & (key_stream == 1), position - 1, position)
    first = tl.maximum(start, position - window)
    return tl.where((key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None]), s, float('-inf'))


@jit
def _softmax_step(s, m, l, scale):
    """Scores of more keys -> their weights, what the sums so far shrink by, new running maximum and sum of weights."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@jit
def _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, h, position, stream, start,
                  windows, T, scale, NK: constexpr, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr,
                  M: constexpr, FULL: constexpr):
    key_stream, n = _walked_tile(i, x, rho, NK, M, FULL)
    rows = tl.arange(0, M)
    seen = n + rows < T
    k0, k1 = _load(_at(k, k_strides, b, h, key_stream, n, A), _rows(k_strides, 0, rows, A), seen, D, D0, D1, not FULL)
    s = _products(q0, q1, k0, k1, D1)
    if not FULL:
        s = _mask(s, position, stream, n + rows, key_stream, start, windows)
    p, alpha, m, l = _softmax_step(s, m, l, scale)
    v0, v1 = _load(_at(v, v_strides, b, h, key_stream, n, A), _rows(v_strides, 0, rows, A), seen, D, D0, D1, not FULL)
    acc0 = acc0 * alpha[:, None]
    if D1 > 0:
        acc1 = acc1 * alpha[:, None]
    acc0, acc1 = _add_products(acc0, acc1, p, v0, v1, D1)
    return acc0, acc1, m, l


@jit
def _forward_kernel(q, k, v, out, lse, doc_start, q_strides, k_strides, v_strides, out_strides, windows, T, H, scale,
                    GROUP: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr, D0: constexpr,
                    D1: constexpr, A: constexpr, N: constexpr, M: constexpr):
    """out and lse of a tile of N query positions; the longest tiles start first."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    key_h = h // GROUP
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * N
    row = tl.arange(0, NQ * N)
    part, position = row // N, first + row % N  # a row is one position of one stream
    stream, seen = FIRST + part, position < T
    start = tl.zeros_like(position)
    if doc_start is not None:
        start = tl.load(doc_start + b * T + position, mask=seen, other=0).to(tl.int32)
    x, rho = _query_tile(doc_start, b, first, T, windows, NQ, NK, FIRST, N, M)
    rows = _rows(q_strides, part, row % N, A)
    q0, q1 = _load(_at(q, q_strides, b, h, 0, first, A), rows, seen, D, D0, D1, True)

    m = tl.full((NQ * N,), -1e30, tl.float32)  # finite: a row may see nothing of its first tile
    l = tl.zeros((NQ * N,), tl.float32)
    acc0 = tl.zeros((NQ * N, D0), tl.float32)
    acc1 = acc0 if D1 == 0 else tl.zeros((NQ * N, D1), tl.float32)
    for i in range(0, x[2] + rho[2]):
        acc0, acc1, m, l = _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, key_h,
                                         position, stream, start, windows, T, scale, NK, D, D0, D1, A, M, True)
    for i in range(0, x[1] + x[3] + rho[1] + rho[3]):
        acc0, acc1, m, l = _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, key_h,
                                         position, stream, start, windows, T, scale, NK, D, D0, D1, A, M, False)
    l = tl.where(seen, l, 1.0)
    rows = _rows(out_strides, part, row % N, A)
    _store(_at(out, out_strides, b, h, 0, first, A), rows, seen, acc0 / l[:, None], acc1 / l[:, None], D, D0, D1)
    tl.store(lse + ((b * NQ + part) * H + h) * T + position, m + tl.log2(l), mask=seen)


@jit
def _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, lse, delta, k, v, k_strides, v_strides, b, h, position,
                         stream, start, windows, T, scale, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr,
                         M: constexpr, FULL: constexpr):
    key_stream, n = _walked_tile(i, x, rho, 2, M, FULL)  # with NK it takes more registers, and one block fits an SM
    rows = tl.arange(0, M)
    seen = n + rows < T
    k0, k1 = _load(_at(k, k_strides, b, h, key_stream, n, A), _rows(k_strides, 0, rows, A), seen, D, D0, D1, not FULL)
    v0, v1 = _load(_at(v, v_strides, b, h, key_stream, n, A), _rows(v_strides, 0, rows, A), seen, D, D0, D1, not FULL)
    s = _products(q0, q1, k0, k1, D1)
    if not FULL:
        s = _mask(s, position, stream, n + rows, key_stream, start, windows)
    p = tl.exp2(s * scale - lse[:, None])
    ds = p * (_products(g0, g1, v0, v1, D1) - delta[:, None])
    return _add_products(acc0, acc1, ds, k0, k1, D1)


@jit
def _query_gradient_kernel(q, k, v, out, grad, lse, delta, dq, doc_start, q_strides, k_strides, v_strides, out_strides,
                           grad_strides, dq_strides, windows, T, H, scale, GROUP: constexpr, NQ: constexpr,
                           NK: constexpr, FIRST: constexpr, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr,
                           N: constexpr, M: constexpr):
    """dq of a tile of N query positions, and delta = sum(out * grad), which the keys' gradient needs too."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    key_h = h // GROUP
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * N
    row = tl.arange(0, NQ * N)
    part, position = row // N, first + row % N
    stream, seen = FIRST + part, position < T
    start = tl.zeros_like(position)
    if doc_start is not None:
        start = tl.load(doc_start + b * T + position, mask=seen, other=0).to(tl.int32)
    x, rho = _query_tile(doc_start, b, first, T, windows, NQ, NK, FIRST, N, M)
    q0, q1 = _load(_at(q, q_strides, b, h, 0, first, A), _rows(q_strides, part, row % N, A), seen, D, D0, D1, True)
    rows = _rows(out_strides, part, row % N, A)
    o0, o1 = _load(_at(out, out_strides, b, h, 0, first, A), rows, seen, D, D0, D1, True)
    rows = _rows(grad_strides, part, row % N, A)
    g0, g1 = _load(_at(grad, grad_strides, b, h, 0, first, A), rows, seen, D, D0, D1, True)
    row_delta = tl.sum(o0.to(tl.float32) * g0.to(tl.float32), 1)
    if D1 > 0:
        row_delta += tl.sum(o1.to(tl.float32) * g1.to(tl.float32), 1)
    statistic = ((b * NQ + part) * H + h) * T + position
    tl.store(delta + statistic, row_delta, mask=seen)
    row_lse = tl.load(lse + statistic, mask=seen, other=float('inf'))

    acc0 = tl.zeros((NQ * N, D0), tl.float32)
    acc1 = acc0 if D1 == 0 else tl.zeros((NQ * N, D1), tl.float32)
    for i in range(0, x[2] + rho[2]):
        acc0, acc1 = _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, row_lse, row_delta, k, v, k_strides,
                                          v_strides, b, key_h, position, stream, start, windows, T, scale, D, D0, D1, A,
                                          M, True)
    for i in range(0, x[1] + x[3] + rho[1] + rho[3]):
        acc0, acc1 = _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, row_lse, row_delta, k, v, k_strides,
                                          v_strides, b, key_h, position, stream, start, windows, T, scale, D, D0, D1, A,
                                          M, False)
    rows = _rows(dq_strides, part, row % N, A)
    scale /= 1.4426950408889634  # d exp2(s log2(e)) = d exp(s)
    _store(_at(dq, dq_strides, b, h, 0, first, A), rows, seen, acc0 * scale, acc1 * scale, D, D0, D1)


@jit
def _key_gradient_tile(n, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta, q_strides, grad_strides, b, h, key,
                       end, window, key_stream, T, H, scale, NQ: constexpr, FIRST: constexpr, D: constexpr,
                       D0: constexpr, D1: constexpr, A: constexpr, N: constexpr, FULL: constexpr):
    row = tl.arange(0, NQ * N)
    part, position = row // N, n + row % N
    seen = position < T
    q0, q1 = _load(_at(q, q_strides, b, h, 0, n, A), _rows(q_strides, part, row % N, A), seen, D, D0, D1, not FULL)
    rows = _rows(grad_strides, part, row % N, A)
    g0, g1 = _load(_at(grad, grad_strides, b, h, 0, n, A), rows, seen, D, D0, D1, not FULL)
    statistic = ((b * NQ + part) * H + h) * T + position
    row_lse = tl.load(lse + statistic, mask=seen, other=float('inf'))
    row_delta = tl.load(delta + statistic, mask=seen, other=0.0)
    p = tl.exp2(_products(k0, k1, q0, q1, D1) * scale - row_lse[None, :])  # (keys, queries)
    if not FULL:
        first = tl.where((FIRST + part == 0)[None, :] & (key_stream == 1), key[:, None] + 1, key[:, None])
        last = tl.minimum(end, key + window + 1)  # exclusive
        p = tl.where((position[None, :] >= first) & (position[None, :] < last[:, None]), p, 0.0)
    dv0, dv1 = _add_products(dv0, dv1, p, g0, g1, D1)
    ds = p * (_products(v0, v1, g0, g1, D1) - row_delta[None, :])
    dk0, dk1 = _add_products(dk0, dk1, ds, q0, q1, D1)
    return dk0, dk1, dv0, dv1


@jit
def _key_gradient_kernel(q, k, v, grad, lse, delta, dk, dv, doc_end, q_strides, k_strides, v_strides, grad_strides,
                         dk_strides, windows, T, H, scale, GROUP: constexpr, NQ: constexpr, NK: constexpr,
                         FIRST: constexpr, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, N: constexpr,
                         M: constexpr):
    """dk and dv of a tile of M keys of one stream and head.

    Walks the queries that see them in tiles of N positions, one query head of the group after the other.
    """
    n_key_head = H // GROUP
    b, h = (tl.program_id(0) // n_key_head).to(tl.int64), tl.program_id(0) % n_key_head
    key_stream, c = tl.program_id(1) % NK, tl.program_id(1) // NK * M
    d = tl.minimum(c + M, T) - 1
    window = windows[0]
    lo, full_lo = c, d
    if NK == 2:
        window = tl.where(key_stream == 0, windows[0], windows[1])
        lo += key_stream * (1 - FIRST) * (2 - NQ)  # of x queries alone, the first to see rho comes one later
        full_lo += key_stream * (1 - FIRST)
    key = c + tl.arange(0, M)
    seen = key < T
    end, end_c, end_d = tl.full((M,), T, tl.int32), T, T
    if doc_end is not None:
        end = tl.load(doc_end + b * T + key, mask=seen, other=0).to(tl.int32)
        end_c = tl.load(doc_end + b * T + c).to(tl.int32)
        end_d = tl.load(doc_end + b * T + d).to(tl.int32)
    full_hi, hi = tl.minimum(end_c, tl.minimum(c + window + 1, T)), tl.minimum(end_d, tl.minimum(d + window + 1, T))
    left, full, right = _tile_walk(lo, full_lo, full_hi, hi, N)
    rows = _rows(k_strides, 0, tl.arange(0, M), A)
    k0, k1 = _load(_at(k, k_strides, b, h, key_stream, c, A), rows, seen, D, D0, D1, True)
    rows = _rows(v_strides, 0, tl.arange(0, M), A)
    v0, v1 = _load(_at(v, v_strides, b, h, key_stream, c, A), rows, seen, D, D0, D1, True)

    dk0 = tl.zeros((M, D0), tl.float32)
    dv0 = tl.zeros((M, D0), tl.float32)
    dk1 = dk0 if D1 == 0 else tl.zeros((M, D1), tl.float32)
    dv1 = dv0 if D1 == 0 else tl.zeros((M, D1), tl.float32)
    for query_h in range(h * GROUP, (h + 1) * GROUP):
        for i in range(0, full):
            n = lo + (left + i) * N
            dk0, dk1, dv0, dv1 = _key_gradient_tile(n, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta,
                                                    q_strides, grad_strides, b, query_h, key, end, window, key_stream,
                                                    T, H, scale, NQ, FIRST, D, D0, D1, A, N, True)
        for i in range(0, left + right):
            n = lo + (i + tl.where(i >= left, full, 0)) * N
            dk0, dk1, dv0, dv1 = _key_gradient_tile(n, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta,
                                                    q_strides, grad_strides, b, query_h, key, end, window, key_stream,
                                                    T, H, scale, NQ, FIRST, D, D0, D1, A, N, False)
    scale /= 1.4426950408889634
    rows = _rows(dk_strides, 0, tl.arange(0, M), A)
    _store(_at(dk, dk_strides, b, h, key_stream, c, A), rows, seen, dk0 * scale, dk1 * scale, D, D0, D1)
    _store(_at(dv, dk_strides, b, h, key_stream, c, A), rows, seen, dv0, dv1, D, D0, D1)


# (query rows, keys, warps, stages) of a tile by pass, per architecture, largest head size and dtype: `python -m
# bench.attention --tune` proposes rows. 'groups': of grouped queries, whose loop over heads takes registers
TILES = {
    ('sm_90', 64, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 3), 'key_gradient': (64, 128, 8, 2),
                        'key_gradient, groups': (32, 128, 8, 2)},
    ('sm_90', 96, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 2), 'key_gradient': (32, 128, 8, 2),
                        'key_gradient, groups': (32, 64, 8, 2)},
    ('sm_90', 128, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 2), 'key_gradient': (32, 128, 8, 2),
                         'key_gradient, groups': (32, 64, 8, 2)},
    ('sm_90', 64, 32): {'forward': (32, 32, 8, 2), 'query_gradient': (32, 32, 4, 2), 'key_gradient': (32, 32, 8, 1)},
    ('sm_90', 128, 32): {'forward': (32, 16, 8, 1), 'query_gradient': (16, 16, 8, 1), 'key_gradient': (16, 16, 8, 1)},
    ('cpu', 128, 32): {'forward': (64, 32, 1, 1), 'query_gradient': (32, 64, 1, 1), 'key_gradient': (64, 32, 1, 1)},
}


@functools.cache
def _architecture(device):
    """The rows of `TILES` for a device: an unknown GPU takes those of sm_90."""
    name = 'sm_{}{}'.format(*torch.cuda.get_device_capability(device)) if device.type == 'cuda' else device.type
    return name if any(name == known for known, *_ in TILES) else 'sm_90'


def tiles(device, head_size, dtype, kind, streams=1, group=1):
    """The tile of a pass: (query positions, keys, warps, stages). group: query heads for each key head."""
    arch = _architecture(device)
    bits = 32 if arch == 'cpu' else torch.finfo(dtype).bits
    largest = min(D for known, D, b in TILES if known == arch and b == bits and D >= head_size)
    of_passes = TILES[arch, largest, bits]
    name = f'{kind}, groups' if group > 1 and f'{kind}, groups' in of_passes else kind
    rows, keys, warps, stages = of_passes[name]
    return rows // streams, keys, warps, stages


def column_blocks(head_size):
    """Head size as two powers of two, 16 or more: (64, 16) for 70; the second is 0 where one is enough."""
    first = max(16, 1 << head_size.bit_length() - 1)
    rest = head_size - first
    return first, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


def _launch(kernel, kind, tensors, strided, q, k, windows, first):
    """Runs an attention kernel over all heads and tiles of q (B, NQ, T, H, D), k (B, NK, T, HK, D)."""
    (B, NQ, T, H, D), NK, n_key_head = q.shape, k.shape[1], k.shape[3]
    N, M, warps, stages = tiles(q.device, D, q.dtype, kind, NQ, H // n_key_head)
    D0, D1 = column_blocks(D)
    grid = (B * n_key_head, NK * triton.cdiv(T, M)) if kind == 'key_gradient' else (B * H, triton.cdiv(T, N))
    strides = [x.stride()[:4] for x in strided]
    A = math.gcd(16, *(stride for x in strides for stride in x))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[grid](*tensors, *strides, tuple(windows), T, H, D ** -0.5 * math.log2(math.e), H // n_key_head, NQ, NK,
                     first, D, D0, D1, A, N, M, num_warps=warps, num_stages=stages)


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_start: torch.Tensor | None,
                      windows: list[int], first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, NQ, T, H, D), k, v (B, NK, T, HK, D) -> out as q, log-sum-exps in base 2 (B, NQ, H, T) fp32.

    windows: one for each stream of keys, at most T; first: the stream of the first queries, 0 for x, 1 for rho.
    """
    B, NQ, T, H, D = q.shape
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    lse = torch.empty(B, NQ, H, T, device=q.device, dtype=torch.float32)
    _launch(_forward_kernel, 'forward', (q, k, v, out, lse, doc_start), (q, k, v, out), q, k, windows, first)
    return out, lse


def attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                       lse: torch.Tensor, doc_start: torch.Tensor | None, windows: list[int],
                       first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v from grad, that of out. Deterministic: each number is summed by one program."""
    T, delta = q.shape[2], torch.empty_like(lse)
    dq, dk, dv = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))
    doc_end = None
    if doc_start is not None:  # the first position whose document starts later
        position = torch.arange(T, device=q.device).expand_as(doc_start).contiguous()
        doc_end = torch.searchsorted(doc_start, position, right=True)
    _launch(_query_gradient_kernel, 'query_gradient', (q, k, v, out, grad, lse, delta, dq, doc_start),
            (q, k, v, out, grad, dq), q, k, windows, first)
    _launch(_key_gradient_kernel, 'key_gradient', (q, k, v, grad, lse, delta, dk, dv, doc_end),
            (q, k, v, grad, dk), q, k, windows, first)
    return dq, dk, dv


_attention_op = torch.library.custom_op('attn_kernels::attention', attention_forward, mutates_args=())
_attention_backward_op = torch.library.custom_op('attn_kernels::attention_backward', attention_backward,
                                                 mutates_args=())


@_attention_op.register_fake
def _(q, k, v, doc_start, windows, first):
    B, NQ, T, H, D = q.shape
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    return out, torch.empty(B, NQ, H, T, device=q.device, dtype=torch.float32)


@_attention_backward_op.register_fake
def _(grad, q, k, v, out, lse, doc_start, windows, first):
    return tuple(torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))


def _save_for_backward(ctx, inputs, output):
    q, k, v, doc_start, ctx.windows, ctx.first = inputs
    ctx.save_for_backward(q, k, v, *output, doc_start)


def _attention_backward(ctx, grad, _):
    *saved, doc_start = ctx.saved_tensors
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return *_attention_backward_op(grad, *saved, doc_start, ctx.windows, ctx.first), None, None, None


_attention_op.register_autograd(_attention_backward, setup_context=_save_for_backward)


def use_triton(q):
    """Whether the Triton kernels run for this tensor."""
    there = triton is not None and (q.is_cuda or KERNELS_ON_CPU) and 'attention' not in refused
    return there and q.shape[-1] <= 128 and q.dtype != torch.float64


def _kernel_attention(q, k, v, doc_start, windows, first):
    """The kernels on q (B, NQ, T, H, D), k, v (B, NK, T, HK, D); a window for each stream of keys, None for all."""
    T = q.shape[2]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    doc_start = None if doc_start is None else doc_start.contiguous()
    windows = [T if w is None else min(w, T) for w in windows]
    return _attention_op(q, k, v, doc_start, windows, first)[0]


# ---- decoding in Triton: a run of new positions over a cache, up to 16 query rows ----
#
# Each program takes a share of the filled slots of one row of the batch and one key head, for all query heads that read
# it, or as many as make 16 rows; `_combine_kernel` merges the shares. The run's own keys come from registers: the
# program of the first share rotates them, writes them to the cache and attends to them there and then, so that nobody
# waits for the write. A cache is [ring of R slots | memory] (`KVCache`); without a ring R is 0. Every size is fixed by
# the shapes, so that a step can be a CUDA graph.

@jit
def _load_halves(x, rows, seen, D: constexpr, HALF: constexpr):
    mask = _in_head(seen, 0, HALF, D // 2)
    a = tl.load(_columns(x, rows, 0, HALF), mask=mask, other=0.0)
    return a, tl.load(_columns(x, rows, D // 2, HALF), mask=mask, other=0.0)


@jit
def _store_halves(x, rows, seen, a, b, D: constexpr, HALF: constexpr):
    mask = _in_head(seen, 0, HALF, D // 2)
    tl.store(_columns(x, rows, 0, HALF), a, mask=mask)
    tl.store(_columns(x, rows, D // 2, HALF), b, mask=mask)


@jit
def _rotated_halves(x, rows, seen, position, cos, sin, D: constexpr, HALF: constexpr):
    """`rotate`: both halves of heads at their positions' angles, in the heads' dtype."""
    a, b = _load_halves(x, rows, seen, D, HALF)
    mask = _in_head(seen, 0, HALF, D // 2)
    cos = tl.load(_columns(cos, position * (D // 2), 0, HALF), mask=mask, other=0.0)
    sin = tl.load(_columns(sin, position * (D // 2), 0, HALF), mask=mask, other=0.0)
    a_up, b_up = a.to(tl.float32), b.to(tl.float32)
    return (a_up * cos - b_up * sin).to(a.dtype), (b_up * cos + a_up * sin).to(a.dtype)


@jit
def _decode_tile(acc, m, l, qa, qb, ka, kb, v, mask, scale):
    s = tl.dot(qa, tl.trans(ka), input_precision='ieee')
    s = tl.dot(qb, tl.trans(kb), s, input_precision='ieee')
    p, alpha, m, l = _softmax_step(tl.where(mask, s, float('-inf')), m, l, scale)
    return tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision='ieee'), m, l


@jit
def _decode_kernel(q, k, v, k_cache, v_cache, out, shares, statistics, positions, slots, doc_start, ring_positions, cos,
                   sin, slots_stride, q_strides, k_strides, v_strides, cache_strides, windows, H, R, scale,
                   n: constexpr, GROUP: constexpr, HEADS: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr,
                   RING_STREAM: constexpr, READS_RING: constexpr, READS_MEMORY: constexpr, D: constexpr,
                   HALF: constexpr, WIDE: constexpr, A: constexpr, M: constexpr):
    """One share of a key head's slots: out itself if there is only one, else shares and statistics.

    n positions of NQ streams of queries and NK of keys, of HEADS of the GROUP query heads that read the key head.
    """
    b, h = (tl.program_id(0) // (H // HEADS)).to(tl.int64), tl.program_id(0) % (H // HEADS) * HEADS
    key_h = (h // GROUP).to(tl.int64)  # in a cache heads are S D apart, which times h may pass 2^31
    share, n_shares = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, 16)
    asks, part, i = row < NQ * HEADS * n, row // (HEADS * n), row % n  # rows: streams, heads, positions
    stream = FIRST + part
    t = tl.load(positions + b * n + i).to(tl.int32)
    first = tl.zeros_like(t)
    if doc_start is not None:
        first = tl.load(doc_start + b * n + i).to(tl.int32)
    start = tl.load(positions + b * n).to(tl.int32)  # tokens before the run
    q_rows = _rows(q_strides, part, i, A) + tl.multiple_of(row // n % HEADS * q_strides[3], [A])
    qa, qb = _rotated_halves(_at(q, q_strides, b, h, 0, 0, A), q_rows, asks, t, cos, sin, D, HALF)
    qa, qb = qa.to(k_cache.dtype.element_ty), qb.to(k_cache.dtype.element_ty)
    k_cache, v_cache = _at(k_cache, cache_strides, b, key_h, 0, 0, A), _at(v_cache, cache_strides, b, key_h, 0, 0, A)
    m = tl.full((16,), -1e30, tl.float32)
    l = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, WIDE), tl.float32)

    ring_window = windows[RING_STREAM]
    memory_window = windows[1 - RING_STREAM]
    filled = tl.minimum(start, R) if READS_RING else 0
    lo = tl.min(tl.where(asks, tl.maximum(first, t - memory_window), start), 0) if READS_MEMORY else start
    lo = tl.maximum(tl.minimum(lo, start), 0)
    ring_tiles = tl.cdiv(filled, M)
    n_tiles = ring_tiles + tl.cdiv(start - lo, M)
    each = tl.cdiv(n_tiles, n_shares)
    for tile in range(share * each, tl.minimum((share + 1) * each, n_tiles)):
        in_ring = tile < ring_tiles
        slot = tl.where(in_ring, R - filled + tile * M, R + lo + (tile - ring_tiles) * M) + tl.arange(0, M)
        there = slot < tl.where(in_ring, R, R + start)
        position = slot - R
        if READS_RING:
            held = tl.load(ring_positions + b * (R + 1) + slot, mask=there & in_ring, other=0)
            position = tl.where(in_ring, held, position)
        key_first = tl.maximum(first, t - tl.where(in_ring, ring_window, memory_window))
        mask = (there & (position < start))[None, :] & (position[None, :] >= key_first[:, None])
        rows = _rows(cache_strides, 0, slot, A)
        ka, kb = _load_halves(k_cache, rows, there, D, HALF)
        values = _load_columns(v_cache, rows, there, 0, WIDE, D, True)
        acc, m, l = _decode_tile(acc, m, l, qa, qb, ka, kb, values, mask, scale)

    if share == 0:  # the run itself
        new, key_stream = row < NK * n, row // n
        slot = tl.load(slots + b * slots_stride + row, mask=new, other=0)
        k_rows = _rows(k_strides, key_stream, i, A)
        ka, kb = _rotated_halves(_at(k, k_strides, b, key_h, 0, 0, A), k_rows, new, t, cos, sin, D, HALF)
        ka, kb = ka.to(k_cache.dtype.element_ty), kb.to(k_cache.dtype.element_ty)
        v_rows = _rows(v_strides, key_stream, i, A)
        values = _load_columns(_at(v, v_strides, b, key_h, 0, 0, A), v_rows, new, 0, WIDE, D, True)
        values = values.to(v_cache.dtype.element_ty)
        rows = _rows(cache_strides, 0, slot, A)
        _store_halves(k_cache, rows, new, ka, kb, D, HALF)
        tl.store(_columns(v_cache, rows, 0, WIDE), values, mask=_in_head(new, 0, WIDE, D))
        window = tl.where(key_stream == 0, windows[0], windows[1])
        last = t[:, None] - ((stream == 0)[:, None] & (key_stream == 1)[None, :]).to(tl.int32)
        earliest = tl.maximum(first[:, None], t[:, None] - window[None, :])
        mask = new[None, :] & (t[None, :] <= last) & (t[None, :] >= earliest)
        acc, m, l = _decode_tile(acc, m, l, qa, qb, ka, kb, values, mask, scale)

    if n_shares == 1:
        _store_decoded(out, acc, l, b, h, H, row, asks, n, HEADS, NQ, D, WIDE)
    else:
        at = (tl.program_id(0) * n_shares + share).to(tl.int64) * 16 + row
        tl.store(_columns(shares, at * WIDE, 0, WIDE), acc)
        tl.store(statistics + at * 2, m)
        tl.store(statistics + at * 2 + 1, l)


@jit
def _store_decoded(out, acc, l, b, h, H, row, asks, n: constexpr, HEADS: constexpr, NQ: constexpr, D: constexpr,
                   WIDE: constexpr):
    """out (B, NQ, n, H, D) of HEADS heads from h on."""
    acc /= tl.where(asks, l, 1.0)[:, None]
    part, head, i = row // (HEADS * n), row // n % HEADS, row % n
    rows = (((b * NQ + part) * n + i) * H + h + head) * D
    tl.store(_columns(out, rows, 0, WIDE), acc.to(out.dtype.element_ty), mask=_in_head(asks, 0, WIDE, D))


@jit
def _combine_kernel(shares, statistics, out, H, n_shares, n: constexpr, HEADS: constexpr, NQ: constexpr, D: constexpr,
                    WIDE: constexpr):
    """Merges the shares of a program's heads."""
    row = tl.arange(0, 16)
    m = tl.full((16,), -1e30, tl.float32)
    l = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, WIDE), tl.float32)
    for share in range(0, n_shares):
        at = (tl.program_id(0) * n_shares + share).to(tl.int64) * 16 + row
        m_share = tl.load(statistics + at * 2)
        m_new = tl.maximum(m, m_share)
        old, new = tl.exp2(m - m_new), tl.exp2(m_share - m_new)
        acc = acc * old[:, None] + tl.load(_columns(shares, at * WIDE, 0, WIDE)) * new[:, None]
        l = l * old + tl.load(statistics + at * 2 + 1) * new
        m = m_new
    b, h = (tl.program_id(0) // (H // HEADS)).to(tl.int64), tl.program_id(0) % (H // HEADS) * HEADS
    _store_decoded(out, acc, l, b, h, H, row, row < NQ * HEADS * n, n, HEADS, NQ, D, WIDE)


DECODE_KEYS = 64  # of a tile
DECODE_SHARE = 256  # slots of the cache that a program is worth
DECODE_PROGRAMS = 264  # enough for an H100's 132 multiprocessors


def decode_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                   cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                   doc_start: torch.Tensor | None, ring_positions: torch.Tensor | None, windows: list[int], first: int,
                   ring_stream: int, reads: str) -> torch.Tensor:
    """`decode_attention` with its defaults filled in: what the operator runs. first: as in `attention_forward`."""
    (B, NQ, n, H, D), NK, group = q.shape, k.shape[1], q.shape[3] // k.shape[3]
    heads = max(heads for heads in range(1, group + 1) if group % heads == 0 and (heads == 1 or heads * NQ * n <= 16))
    programs = B * H // heads
    S, R = k_cache.shape[2], 0 if ring_positions is None else ring_positions.shape[1] - 1
    n_shares = max(1, min(DECODE_PROGRAMS // programs, S // DECODE_SHARE))
    half, wide = (max(16, triton.next_power_of_2(d)) for d in (D // 2, D))
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    shares = torch.empty(programs, n_shares, 16, wide, device=q.device, dtype=torch.float32)
    statistics = torch.empty(programs, n_shares, 16, 2, device=q.device, dtype=torch.float32)
    strides = [x.stride()[:4] for x in (q, k, v)] + [(k_cache.stride(0), 0, k_cache.stride(2), k_cache.stride(1))]
    A = math.gcd(16, *(stride for x in strides for stride in x))
    # halves that do not start on 16 bytes go through registers; a product on a GPU takes 16 keys at least
    keys = DECODE_KEYS if D % 16 == 0 else max(16, DECODE_KEYS // 2)
    with torch.cuda.device_of(q):
        _decode_kernel[programs, n_shares](
            q, k, v, k_cache, v_cache, out, shares, statistics, positions, slots, doc_start, ring_positions, cos, sin,
            slots.stride(0), *strides, tuple(windows), H, R, D ** -0.5 * math.log2(math.e), n, group, heads, NQ, NK,
            first, ring_stream, reads != 'memory', reads != 'ring', D, half, wide, A, keys, num_warps=4,
            num_stages=2 if k_cache.dtype == torch.float32 else 3)  # a stage holds tiles of the cache
        if n_shares > 1:
            _combine_kernel[programs,](shares, statistics, out, H, n_shares, n, heads, NQ, D, wide, num_warps=4,
                                       num_stages=2)
    return out


_decode_op = torch.library.custom_op('attn_kernels::decode', decode_forward, mutates_args=('k_cache', 'v_cache'))


@_decode_op.register_fake
def _(q, *args):
    return torch.empty(q.shape, device=q.device, dtype=q.dtype)


def has_decode_kernel(cache, rows):
    """Whether `decode_attention` serves a run of so many query rows over this cache (a tensor)."""
    return use_triton(cache) and not REFERENCE and 'decoding' not in refused and rows <= 16


def decode_attention(q, k, v, k_cache, v_cache, rope, positions, slots, doc_start, windows, *, queries='both',
                     ring_positions=None, ring_stream=1, reads='both'):
    """Rotates a run's queries and keys, stores keys and values, and attends over what the cache then holds.

    q (B, NQ, n, H, D), k, v (B, NK, n, HK, D) of the active streams, NQ n and NK n at most 16; k_cache, v_cache (B,
    HK, S, D), [ring of R slots | memory]; rope: tables of all positions; positions (B, n) int64 of the run; slots (B,
    NK, n) that take its keys; doc_start (B, n) or None; windows: of x and rho, None for all. ring_positions (B, R + 1):
    what each ring slot holds, None without a ring; ring_stream: the stream whose keys are there; reads: 'ring',
    'memory' or 'both'. Returns (B, NQ, n, H, D).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    windows = [2 ** 31 - 1 if w is None else w for w in windows]
    doc_start = None if doc_start is None else doc_start.contiguous()
    return _decode_op(q, k, v, k_cache, v_cache, *rope, positions.contiguous(), slots, doc_start, ring_positions,
                      windows, STREAMS[queries][0], ring_stream, reads)


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32 at least, then in the dtype of x.

    x (..., C), weight (C,). Under autocast the result already has the dtype that the product after it wants.
    """
    dtype = _product_dtype(x)
    if 'norm' not in refused:
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, eps, dtype)
        if (x.is_cuda or KERNELS_ON_CPU) and x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, eps).to(dtype)  # one kernel, where the definition launches eight
    return _rms_norm(x, weight, eps, dtype)[0]


def _product_dtype(x):
    """Of products with x: autocast's dtype where that is on. As in PyTorch's operators it leaves float64 alone."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def _rms_norm(x, weight, eps, dtype):
    """The definition of `rms_norm`, and the 1 / sqrt that its gradient needs."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    r = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    # torch.compile of PyTorch 2.11 loses the gradient of a result that is from an in-place operator or a no-op `to`.
    y = x * r * weight
    return y if y.dtype == dtype else y.to(dtype), r


class _RMSNorm(torch.autograd.Function):
    """Half the passes over memory that autograd makes of the definition."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        y, r = _rms_norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, r, weight)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, r, weight = ctx.saved_tensors
        x_up, grad, w = x.to(r.dtype), grad.to(r.dtype), weight.to(r.dtype)
        rows = (grad * x_up).flatten(0, -2)  # (N, C)
        grad_weight = rows.T @ r.flatten()
        dot = (rows @ w).view_as(r)
        grad_x = (grad * w).mul_(r).addcmul_(x_up, dot * r.pow(3) / x.shape[-1], value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def rope_table(positions, head_size, theta, scaling=None):
    """cos and sin, fp32, of the angles position * theta^(-2j/D), j < D/2. positions (...) -> two of (..., 1, D/2).

    scaling: for windows longer than those of pretraining, as Llama 3 has it: 'factor,low,high,tokens'. What turns less
    than `low` times in `tokens` positions is slowed by `factor`, what turns more than `high` times is not.
    """
    j = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    frequency = 1 / theta ** (j / head_size)
    if scaling:
        factor, low, high, tokens = parse_rope_scaling(scaling)
        turns = tokens * frequency / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / factor)
    angles = positions[..., None, None] * frequency
    return angles.cos(), angles.sin()


def parse_rope_scaling(text):
    """The four numbers of a scaling, as `rope_table` takes it. Raises ValueError."""
    try:
        factor, low, high, tokens = map(float, text.split(','))
    except ValueError:
        factor = low = high = tokens = 0.0
    if not (1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= tokens < math.inf):
        raise ValueError(f"rope_scaling = {text!r}: expected 'factor,low,high,tokens', as '8,1,4,8192' of Llama 3")
    return factor, low, high, tokens


def rotate(x, cos, sin):
    """Rotary position embedding: turns each pair (x_j, x_{j + D/2}) by its angle, the layout of Hugging Face Llama.

    x (..., T, H, D) of any dtype; cos, sin from `rope_table`, (T, 1, D/2) or whatever broadcasts to (..., T, H, D/2).
    """
    custom = torch.is_grad_enabled() and 'rotation' not in refused
    return _Rotate.apply(x, cos, sin) if custom else _rotate(x, cos, sin)


def _rotate(x, cos, sin):
    """The definition of `rotate`."""
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    y, half = torch.empty_like(x), x.shape[-1] // 2
    y[..., :half].copy_((a * cos).addcmul_(b, sin, value=-1))
    y[..., half:].copy_((b * cos).addcmul_(a, sin))
    return y


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so nothing of x is kept."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


MOST_PARTS_OF_A_GRAPH = 40  # of the logits; each is 48 nodes of the compiler's graph


def linear_cross_entropy_reference(hidden, weight, targets, row_weights=None):
    """`linear_cross_entropy` as its definition, with all logits in memory."""
    nll = F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=-1, reduction='none')
    if row_weights is None:
        return nll.sum() / (targets >= 0).sum().clamp(min=1)
    return (row_weights * nll).sum()


def linear_cross_entropy(hidden, weight, targets, max_logits=2 ** 26, row_weights=None):
    """Mean negative log-likelihood in nats of targets under softmax(hidden weight^T), without holding all logits.

    hidden (N, C), weight (V, C), targets (N,) int64 with -1 for rows that do not count. Logits are made in parts of
    whole 256s of rows, at least 256: as many as max_logits numbers hold, on a CPU in bf16 twice as many. Products run
    in the autocast dtype, the softmax in fp32. Returns a scalar; 0 if no row counts. With row_weights (N,) it is the
    sum of row_weights times the rows' negative log-likelihoods.
    """
    if 'loss' in refused:
        return linear_cross_entropy_reference(hidden, weight, targets, row_weights)
    return _fused_losses(hidden.unsqueeze(0), weight, targets, row_weights, None, True, max_logits)[0]


def linear_cross_entropy_kl_reference(states, weight, targets, counts, head_frozen=True):
    """`linear_cross_entropy_kl` as its definition, with all logits in memory."""
    nll = linear_cross_entropy_reference(states[0], weight, targets)
    of_p, of_q = states[0] @ weight.T, states[1:] @ (weight.detach() if head_frozen else weight).T
    wide = torch.promote_types(of_p.dtype, torch.float32)  # autocast on a CPU would leave log_softmax in bf16
    p, q = of_p.detach().log_softmax(-1, dtype=wide), of_q.log_softmax(-1, dtype=wide)
    kl = (p.exp() * (p - q)).sum(-1) * counts
    return nll, (kl.sum(1) / counts.sum(1).clamp(min=1)).mean()


def linear_cross_entropy_kl(states, weight, targets, counts, head_frozen=True, max_logits=2 ** 26):
    """Cross-entropy of states[0], and the KL divergence of its softmax from those of the guesses states[1:].

    states (1 + d, N, C); weight, targets, max_logits as in `linear_cross_entropy`, whose value is the first of the two
    results. The second is the mean over d of the mean over the rows that counts (d, N) marks of KL(p || q_i), p =
    softmax(states[0] weight^T) and q_i = softmax(states[i] weight^T). Nothing of it is learned by p; by the weight
    through the q_i, unless head_frozen.
    """
    if 'loss' in refused:
        return linear_cross_entropy_kl_reference(states, weight, targets, counts, head_frozen)
    return _fused_losses(states, weight, targets, None, counts, head_frozen, max_logits)


def _fused_losses(states, weight, targets, row_weights, counts, head_frozen, max_logits):
    device, dtype = states.device.type, _product_dtype(states)
    if device == 'cpu' and dtype == torch.bfloat16:
        max_logits *= 2  # in the memory of fp32 ones: fewer, larger products
    chunk_rows = max(1, max_logits // (256 * weight.shape[0] * len(states))) * 256  # whole tiles of the products
    with_grad = torch.is_grad_enabled()  # autograd does not tell the function below
    has_many_parts = device == 'cpu' or states.shape[1] > MOST_PARTS_OF_A_GRAPH * chunk_rows
    apply = _losses_outside_graphs if has_many_parts else _FusedLosses.apply
    return apply(states, weight, targets, row_weights, counts, head_frozen, dtype, chunk_rows, with_grad)


@outside_graphs  # a compiler would unroll the parts, and take minutes; on a CPU also to make the step slower
def _losses_outside_graphs(*args):
    return _FusedLosses.apply(*args)


class _FusedLosses(torch.autograd.Function):
    """Forms the gradient in the forward, while a chunk's logits are at hand: three products; recomputing takes four."""

    @staticmethod
    def forward(ctx, states, weight, targets, row_weights, kl_counts, head_frozen, dtype, chunk_rows, with_grad):
        S, N, C = states.shape
        counts = targets >= 0
        s, w = states.to(dtype), weight.to(dtype)
        h_counted = s[0] * counts.unsqueeze(1)  # so that rows that do not count add nothing to weight's gradient
        on_cpu = s.device.type == 'cpu'
        softmax_rows = max(1, 2 ** 20 // w.shape[0]) if on_cpu else chunk_rows  # on CPU a part stays in the cache
        softmax_dtype = torch.promote_types(dtype, torch.float32)
        loss, kl = torch.zeros(2, dtype=softmax_dtype, device=s.device)
        by_row = counts.to(softmax_dtype) if row_weights is None else row_weights.to(softmax_dtype) * counts
        kl_by_row = None
        if S > 1:
            kl_by_row = kl_counts.to(softmax_dtype) / kl_counts.sum(1, keepdim=True).clamp(min=1)
        grad_s = torch.empty_like(s) if with_grad else None
        grad_w = kl_grad_w = None
        with torch.autocast(s.device.type, enabled=False):
            for a in range(0, N, chunk_rows):
                rows = slice(a, a + chunk_rows)
                chunk = s[:, rows].flatten(0, 1)
                logits = (chunk @ w.T).view(S, -1, w.shape[0])
                for b in range(0, logits.shape[1], softmax_rows):
                    part, here = logits[:, b:b + softmax_rows], slice(a + b, min(a + b + softmax_rows, a + chunk_rows))
                    p = torch.softmax(part[0], -1, dtype=softmax_dtype)
                    index = targets[here].clamp(min=0).unsqueeze(1)
                    p_target = p.gather(1, index).squeeze(1)
                    if on_cpu and p_target.min() > 1e-30:
                        nll = -p_target.log()
                    else:  # the target's probability may underflow, the largest one cannot
                        nll = _log_sum_exp(part[0], p) - part[0].gather(1, index).squeeze(1)
                    loss += (nll * by_row[here]).sum()
                    log_z = _log_sum_exp(part[0], p) if S > 1 else None  # before the gradient is written over part[0]
                    for i in range(1, S):  # KL = sum p (log p - log q), and its gradient by q's logits is q - p
                        q = torch.softmax(part[i], -1, dtype=softmax_dtype)
                        divergence = (p * (part[0].to(p.dtype) - part[i])).sum(-1)
                        divergence += _log_sum_exp(part[i], q) - log_z
                        kl += (divergence * kl_by_row[i - 1, here]).sum()
                        if with_grad:
                            part[i].copy_(q.sub_(p).mul_(kl_by_row[i - 1, here].unsqueeze(1)))
                    if with_grad:  # d nll / d logits = softmax - one_hot, written over the logits
                        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
                        if row_weights is not None:
                            p.mul_(by_row[here].unsqueeze(1))
                        part[0].copy_(p)
                if with_grad:
                    grad_s[:, rows] = (logits.flatten(0, 1) @ w).view(S, -1, C)
                    grad_w = _add_product(grad_w, logits[0], h_counted[rows], weight.dtype)
                    if S > 1 and not head_frozen:
                        of_guesses = logits[1:].flatten(0, 1), chunk[logits.shape[1]:]
                        kl_grad_w = _add_product(kl_grad_w, *of_guesses, weight.dtype)
        scale = 1 / counts.sum().clamp(min=1).to(softmax_dtype) if row_weights is None else torch.ones_like(loss)
        if with_grad:
            ctx.save_for_backward(grad_s, grad_w, kl_grad_w, counts, scale)
            ctx.states_dtype = states.dtype
        return loss * scale, kl / max(1, S - 1)

    @staticmethod
    def backward(ctx, grad, kl_grad):
        grad_s, grad_w, kl_grad_w, counts, scale = ctx.saved_tensors
        scale, kl_scale = scale * grad, kl_grad / max(1, len(grad_s) - 1)
        factors = torch.cat([(counts * scale).unsqueeze(0), kl_scale.expand(len(grad_s) - 1, len(counts))])
        grad_w = grad_w * scale.to(grad_w.dtype)
        if kl_grad_w is not None:
            grad_w.add_(kl_grad_w * kl_scale.to(grad_w.dtype))
        return (grad_s * factors.unsqueeze(-1)).to(ctx.states_dtype), grad_w, *[None] * 7


def _add_product(total, a, b, dtype):
    """total + a^T b, in place and in dtype; None is zero. a (n, V), b (n, C) -> (V, C)."""
    if a.device.type == 'cpu' and a.dtype == torch.bfloat16:
        # half the time of a^T b: oneDNN is slow where the first matrix is a transposed one
        part = (b.T.contiguous() @ a).T.to(dtype, memory_format=torch.contiguous_format)
    else:
        part = a.T @ b
    return part.to(dtype) if total is None else total.add_(part)


def _log_sum_exp(logits, p):
    """From logits (n, V) and their softmax p (n, V): (n,)."""
    return logits.amax(-1).to(p.dtype) - p.amax(-1).log()


# ---- the KV cache: what `extend` keeps of the tokens it has read ----
#
#     cache = KVCache(...)                        room for max_tokens tokens a row
#     place = cache.begin(tokens, lengths)        where the new tokens stand; place[:, a:b] is a part of the run
#     q, k = place.rotate(qk)                     in each layer that rotates; where the kernel does it, it is told to
#     out = cache.attend(place, layer, q, k, v)   stores k and v, attends over all that is there
#     last = cache.end(place, h)                  the tokens count as read; the last one's vector of each row
#     cache.rollback(n)                           forgets the last n of them


class KVCache:
    """Keys and values of up to max_tokens tokens a row, in static shapes, so that a step can be one CUDA graph.

    The slots of a layer, where there is one stream of keys, and where there are two, one of them in a ring of R slots:

        [ memory | spare ]            [ ring | memory | spare ]         position p:  memory  slot R + p
          0 ...                         0 .... R ...                                 ring    slot R - 1 - p % R

    So what is filled is one range around R. The ring's slots are those that the window reaches; those of the longest
    call that is written before it is read, so that after its rollback the window before it is still there; and one for
    padding. Where that is not fewer than max_tokens, it holds all. What lands in the spare slot is never seen.

    n_layer layers of n_kv_head key heads of head_size; max_run: the longest call that has static shapes and can be
    rolled back; width: of the vectors in `hidden`; windows: one for each stream of keys, in positions, None for
    all; ring_stream: the stream in the ring, 0 or 1, None where there is one stream; eos_id: None for one endless
    document; rope_theta, rope_scaling as in `rope_table`.
    """

    def __init__(self, n_layer, n_kv_head, head_size, batch_size, max_tokens, max_run, width, windows, ring_stream=None,
                 rope_theta=10000.0, rope_scaling=None, eos_id=None, device=None, dtype=None):
        self.max_tokens, self.max_run, self.windows = max_tokens, max_run, list(windows)
        self.ring_stream, self.eos_id = ring_stream, eos_id
        self.ring_slots = 0
        self.piece_len = max_tokens  # a longer call on a filled cache goes in pieces
        if ring_stream is not None:
            self.ring_slots, window = max_tokens + 1, windows[ring_stream]
            longest = max(max_run, 4)  # shorter pieces would make a long prefill slow
            if window is not None and window + longest < max_tokens:  # else the ring holds everything
                self.ring_slots, self.piece_len = window + longest + 1, longest
        shape = (n_layer, batch_size, n_kv_head, self.ring_slots + max_tokens + 1, head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.ring_positions = None  # what each slot of the ring holds, and a spare one
        if ring_stream is not None:
            nothing = 2 ** 62  # later than every query
            self.ring_positions = torch.full((batch_size, self.ring_slots + 1), nothing, device=device)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = torch.zeros(batch_size, max_tokens + 2, device=device, dtype=torch.int64)  # of each position
        # What the head multiplies, of the last call, and which of it is each row's last token; -1: all are forgotten.
        self.hidden = torch.zeros(batch_size, max_run, width, device=device, dtype=dtype)
        self.last = torch.full((batch_size,), -1, device=device)
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), head_size, rope_theta, rope_scaling)
        self.batch_idx = torch.arange(batch_size, device=device).unsqueeze(1)

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(x.nbytes for value in vars(self).values() for x in (value if isinstance(value, tuple) else [value])
                   if isinstance(x, torch.Tensor))

    def begin(self, tokens, lengths=None):
        """The `Place` of new tokens (B, n), right-padded to lengths (B,) >= 1 if given.

        Raises ValueError if a row has no room left; in a run of n <= max_run on a GPU, where looking would mean
        waiting, keeping within max_tokens is the caller's part.
        """
        n = tokens.shape[1]
        n_new = torch.full_like(self.lengths, n) if lengths is None else lengths
        end = self.lengths + n_new
        if tokens.device.type == 'cpu' or n > self.max_run:
            longest = int(end.max())
            if longest > self.max_tokens:
                raise ValueError(f'a row of {longest} tokens does not fit a cache of max_tokens = {self.max_tokens}')
        offsets = torch.arange(n, device=tokens.device)
        positions = (self.lengths[:, None] + offsets).minimum(end[:, None])  # padding is all at `end`
        doc_start = None if self.eos_id is None else self._document_starts(tokens, positions)
        is_prefill = n > self.max_run and not self.lengths.any()
        tail_idx = (n_new[:, None] - self.max_run).clamp(min=0) + offsets[:self.max_run]
        return Place(self, positions, doc_start, n_new, tail_idx, is_prefill, n <= self.max_run)

    def _document_starts(self, tokens, positions):
        """Where each new token's document starts (B, n); the cache learns it for the position after each of them."""
        is_end = tokens == self.eos_id
        first = self.doc_start[self.batch_idx, self.lengths[:, None]]
        later = torch.where(is_end[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        self.doc_start[self.batch_idx, positions + 1] = torch.where(is_end, positions + 1, doc_start)
        return doc_start

    def _slots(self, positions):
        """Where keys at positions (B, n) go: (B, streams, n). The ring takes the last R of each row, and notes them."""
        R, memory = self.ring_slots, self.ring_slots + positions
        if R == 0:
            return memory.unsqueeze(1)
        ring = torch.where(positions > positions[:, -1:] - R, R - 1 - positions % R, R + self.max_tokens)
        self.ring_positions[self.batch_idx, ring.clamp(max=R)] = positions
        return torch.stack([ring, memory] if self.ring_stream == 0 else [memory, ring], 1)

    def attend(self, place, layer, q, k, v, streams='both', queries=None):
        """Stores the run's keys and values, and attends over all that its tokens see. May be repeated for the same run.

        One stream: q (B, n, H, D), k, v (B, n, HK, D), q and k already through `place.rotate`. Two: (B, streams, n,
        heads, D), k and v of the active `streams`, 'both', 'input' or 'predict', q of `queries`, None for the same.
        Returns the shape of q.
        """
        if q.dim() == 4:
            return self.attend(place, layer, *(x.unsqueeze(1) for x in (q, k, v)), 'input').squeeze(1)
        queries, slots = queries or streams, place.slots
        if streams != 'both':
            slots = slots.narrow(1, STREAMS[streams][0], 1)
        k_cache, v_cache = self.k[layer], self.v[layer]
        if place.use_kernel:
            ring_stream = 1 if self.ring_stream is None else self.ring_stream
            reads = 'both' if streams == 'both' else 'ring' if ring_stream == 0 else 'memory'
            rope = self.rope if place.asks_rotation else place.no_rotation
            place.asks_rotation = False
            return decode_attention(q, k, v, k_cache, v_cache, rope, place.positions, slots, place.doc_start,
                                    [*self.windows, None][:2], queries=queries, ring_positions=self.ring_positions,
                                    ring_stream=ring_stream, reads=reads)
        batch_idx = self.batch_idx.unsqueeze(1)
        k_cache[batch_idx, :, slots] = k.to(k_cache.dtype)
        v_cache[batch_idx, :, slots] = v.to(v_cache.dtype)
        if place.is_prefill:  # the cache was empty: the new tokens see only each other
            return two_stream_attention(q, k, v, self.windows, place.doc_start, queries)
        seen, mask = place.seen_by_x if streams == 'input' else place.seen_by_both
        if streams != 'input' and queries != 'both':
            mask = mask.chunk(2, 1)[STREAMS[queries][0]]
        return slot_attention(q.flatten(1, 2), k_cache[:, :, seen], v_cache[:, :, seen], mask).view_as(q)

    def end(self, place, h):
        """Counts the new tokens as read. h: what the head multiplies (B, n, C), or of `place.tail_idx` alone (B, m, C).

        Returns the vector of each row's last token (B, C).
        """
        tail_idx = place.tail_idx
        tail = h if h.shape[1] == tail_idx.shape[1] else h[self.batch_idx, tail_idx]
        self.lengths += place.n_new
        self.hidden[:, :tail.shape[1]] = tail
        self.last.copy_(place.n_new - 1 - tail_idx[:, 0])
        return tail[self.batch_idx[:, 0], self.last]

    def rollback(self, n):
        """Forgets the last n tokens of the last call: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n
        self.last -= n


class Place:
    """Where the new tokens of a call stand in a cache, from `KVCache.begin`.

    positions (B, n) int64; doc_start (B, n) or None; n_new (B,), the tokens of each row; tail_idx (B, m), which of them
    are the last max_run; is_prefill: a long call on an empty cache, whose tokens see only each other; use_kernel: the
    Triton kernel rotates, stores and attends; asks_rotation: `rotate` was called since the last `attend`.
    """

    def __init__(self, cache, positions, doc_start, n_new=None, tail_idx=None, is_prefill=False, is_short=True):
        self.cache, self.positions, self.doc_start = cache, positions, doc_start
        self.n_new, self.tail_idx, self.is_prefill = n_new, tail_idx, is_prefill
        n_streams = 1 if cache.ring_stream is None else 2
        self.use_kernel = is_short and has_decode_kernel(cache.k, n_streams * positions.shape[1])
        self.asks_rotation = False

    def __getitem__(self, at):
        """A part of the run: place[:, a:b] for columns of all rows, place[batch_idx, idx] for columns of each row."""
        doc_start = None if self.doc_start is None else self.doc_start[at]
        return Place(self.cache, self.positions[at], doc_start, is_short=isinstance(at[1], slice))

    @functools.cached_property
    def slots(self):
        """The slots that take the run's keys, (B, streams, n)."""
        return self.cache._slots(self.positions)

    @functools.cached_property
    def _rope(self):
        cos, sin = (table[self.positions] for table in self.cache.rope)
        return (cos, sin) if self.cache.ring_stream is None else (cos.unsqueeze(1), sin.unsqueeze(1))

    def rotate(self, qk):
        """Queries or keys (B, n, H, D), of two streams (B, streams, n, H, D), at their positions' angles.

        Where the kernel serves, they are rotated in the next `attend`: nothing but this may come between the two.
        """
        self.asks_rotation = True
        return qk if self.use_kernel else rotate(qk, *self._rope)

    @functools.cached_property
    def no_rotation(self):
        """For the kernel, the table of a layer without rotary positions: all angles are 0."""
        return tuple(torch.full_like(table, value) for table, value in zip(self.cache.rope, (1, 0)))

    @functools.cached_property
    def _filled(self):
        """The slots to read, of ring and memory: on CPU what is filled, elsewhere all, so that nothing waits."""
        cache, R = self.cache, self.cache.ring_slots
        first, end = 0, cache.max_tokens + 1
        if self.positions.device.type == 'cpu':
            end = min(cache.max_tokens, int(self.positions.max())) + 1
            if R == 0 and cache.windows[0] is not None and not REFERENCE:  # else `visible` may see what is before it
                first = max(0, int(self.positions.min()) - cache.windows[0])
        return slice(max(0, R - end), R), slice(R + first, R + end)

    @functools.cached_property
    def _key_positions(self):
        """What the slots to read hold: positions of the ring (B, r) and of the memory (m,)."""
        (ring, memory), R = self._filled, self.cache.ring_slots
        in_ring = self.cache.ring_positions[:, ring] if R else None
        return in_ring, torch.arange(memory.start - R, memory.stop - R, device=self.positions.device)

    @functools.cached_property
    def seen_by_x(self):
        """What queries of x see of x's keys, where x is alone: (slots, mask (B, n, slots))."""
        part = 0 if self.cache.ring_stream == 0 else 1  # the ring or the memory
        mask = visible(self.positions, self._key_positions[part], self.doc_start, self.cache.windows[0])
        return self._filled[part], mask

    @functools.cached_property
    def seen_by_both(self):
        """What queries of both streams see, x's first: (slots, mask (B, 2n, slots)), the ring before the memory."""
        (ring, memory), (in_ring, in_memory) = self._filled, self._key_positions
        x, rho = (in_ring, in_memory) if self.cache.ring_stream == 0 else (in_memory, in_ring)
        mask = two_stream_visible(self.positions, x, rho, self.cache.windows, self.doc_start)
        if self.cache.ring_stream == 1:
            mask = mask.roll(in_ring.shape[1], -1)
        return slice(ring.start, memory.stop), mask


# ---- equations and their fast form ----
#
# GPN, Gated DeltaNet, and Context-Ready trained by backpropagation through time have a fast form of their equations in
# scans/. It stands in for them only where both are shown, on the spot, to be one function: an edited equation, an
# override, a hook, a swapped module or a kernel that a compiler gets wrong all end in the equations. Nothing is assumed
# about the source of either.

# The largest relative difference that is rounding. In fp32 GPN's forms are mostly 2e-6 apart, and an edit of one part
# in a thousand gives 1e-4 and more. Where both agree in float64 and rounding grows from step to step, fp32 may be
# AMPLIFIED times as far off as the equations themselves are in fp32: gradients that nearly cancel were up to 30.
TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-9, torch.bfloat16: 0.05}
AMPLIFIED = {torch.float32: 40, torch.bfloat16: 5}


def import_scan(name):
    """The module scans/<name>.py, or None where there is no such file. One that is there but broken raises."""
    found = importlib.util.find_spec('scans') and importlib.util.find_spec(f'scans.{name}')
    return importlib.import_module(f'scans.{name}') if found else None


def choose_scan(model, scan, **for_the_check):
    """Whether `model` runs its equations or their fast form in `scan`, a module or None: a dict that says so and why.

        scan        'loop', the equations, or 'fast'
        difference  the largest relative difference of both forms in any output, None without a comparison
        where       in which output or gradient that is; or what the fast form raised (difference inf); or a hook
        unused      names of parameters that get no gradient from the equations, where these have been run
        decoding    what decoding by the equations raised, if it did
        seconds     that the check took
        device      the type of device it holds for

    By model.config.scan: 'loop', 'fast', or 'auto', which is fast where states, loss and all gradients agree to
    rounding. Call it under the autocast that the model will run under. The model has `states(idx)`, `forward(idx,
    targets)` with a 'loss', and runs the form that its `scan_report['scan']` names. Where it has `cached_states(idx)`,
    the same states by its code for decoding, these are compared too. for_the_check: settings of its config during the
    check, so small that every boundary comes in a few tokens. With several processes the first decides for all, so all
    must come here, before DDP wraps the model: call `model.choose_scan()` yourself. Raises ValueError for 'fast'
    without a scan.
    """
    start, device = time.perf_counter(), next(model.parameters()).device
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_first = not distributed or torch.distributed.get_rank() == 0
    report = {'scan': 'loop', 'difference': None, 'where': None, 'unused': []}
    if model.config.scan == 'fast' and scan is None:
        raise ValueError("scan = 'fast', but there is no folder scans/ here: use scan = 'loop' or 'auto'")
    has_fp64 = device.type != 'mps'  # by which rounding is judged
    compare = model.config.scan == 'auto' and scan is not None and not REFERENCE and has_fp64
    if model.config.scan == 'fast':
        report['scan'] = 'fast'
    elif is_first and device.type != 'meta' and (compare or distributed):  # DDP must know of unused parameters
        hook = _inner_hook(model) if compare else None
        if distributed or not hook:
            report |= _compare_forms(model, compare and not hook, for_the_check)
        report['where'] = hook or report['where']
    report |= {'seconds': time.perf_counter() - start, 'device': device.type}
    if distributed:
        box = [report]
        torch.distributed.broadcast_object_list(box, 0)
        report = box[0]
    if is_first:
        _say_why(model, report)
    return report


def _say_why(model, report):
    """One line on stderr where the fast form was refused or parameters are unused."""
    reasons = []
    if report['scan'] == 'loop' and report['where'] is not None:
        if report['difference'] is None:
            reasons.append(f'the fast form in scans/ would leave out {report["where"]}')
        elif report['difference'] == math.inf:
            reasons.append(f'the fast form in scans/ fails ({report["where"]})')
        else:
            reasons.append(f'the fast form in scans/ differs from the equations by {report["difference"]:.1g} in '
                           f'{report["where"]}')
        reasons.append('The equations run as they read, step by step. After an edit that is as it should be: '
                       "set scan = 'loop' (--scan=loop) to skip this check")
    if 'decoding' in report:
        reasons.append(f'Decoding fails ({report["decoding"]}): training goes on, by the equations, but `extend` and '
                       '`Cache` must follow the edit')
    if report['unused']:
        reasons.append(f'The equations make no use of {", ".join(report["unused"])}')
    if reasons:
        print(f'{type(model).__module__}: {". ".join(reasons)}', file=sys.stderr, flush=True)


def _inner_hook(model):
    """The first hook on a module inside the model, in words, or None: one that only looks changes no number."""
    for name, module in model.named_modules():
        hooks = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
        if name and any(getattr(module, kind, None) for kind in hooks):
            return f'the hook on {name}'


class _Form(torch.nn.Module):
    """States, loss and gradients of a model in one form: one call, which `functional_call` can give other weights."""

    def __init__(self, model, form, decodes):
        super().__init__()
        self.model, self.form, self.decodes = model, form, decodes

    def forward(self, weights, idx):
        report = self.model.scan_report
        self.model.scan_report = {'scan': self.form, 'device': idx.device.type}
        try:
            self.model.eval()
            with torch.no_grad():
                found = {'the states': self.model.states(idx)}
                if self.decodes and hasattr(self.model, 'cached_states'):
                    found['the cached states'] = self.model.cached_states(idx)
            torch.manual_seed(0)  # what both forms draw alike is the same then; the caller keeps the generators
            self.model.train()
            loss = self.model(idx, idx.roll(-1, 1))['loss']
            wanted = {name.removeprefix('model.'): w for name, w in weights.items() if w.requires_grad}
            grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        finally:
            self.model.scan_report = report
        return found | {'the loss': loss.detach()} | dict(zip(wanted, grads))


def _compare_forms(model, with_scan, for_the_check):
    """What `choose_scan` reports of the equations and, with_scan, of how far the fast form is from them.

    Two windows of a few tokens, with a document's end where the model has documents; weights moved off their values by
    noise, because many are zero at first and hide what comes before them; states in evaluation, loss and gradients in
    training mode; with the settings for_the_check. `F.dropout` multiplies by fixed factors, so that an edit of dropout
    is seen, and forms that draw their masks in different order are still one function.
    """
    config, device = model.config, next(model.parameters()).device
    settings, modes = {key: getattr(config, key) for key in for_the_check}, {m: m.training for m in model.modules()}
    precision, generators = torch.get_float32_matmul_precision(), [device] if device.type == 'cuda' else []
    dropout = F.dropout
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(generators):
        try:
            for key, value in for_the_check.items():
                setattr(config, key, value)
            torch.set_float32_matmul_precision('highest')
            F.dropout = _fixed_dropout
            for seed in range(3):  # rounding may put an input of a ReLU on its other side: hardly in three draws
                report = _compare_once(model, with_scan, *_noisy_weights_and_tokens(model, device, seed))
                if report['scan'] == 'fast' or not report['rounding']:
                    break
        finally:
            F.dropout = dropout
            torch.set_float32_matmul_precision(precision)
            for key, value in settings.items():
                setattr(config, key, value)
            for module, mode in modes.items():
                module.training = mode
    del report['rounding']
    return report


def _fixed_dropout(x, p=0.5, training=True, inplace=False):
    """In the place of F.dropout: factors of 1 - p to 1, not all alike, which a norm after them would take out again."""
    return x * torch.linspace(1 - p, 1, x.shape[-1], device=x.device, dtype=x.dtype) if training else x


def _compare_once(model, with_scan, weights, idx):
    """`_compare_forms` for one draw of weights and tokens; besides, 'rounding': both forms agree in float64.

    On a GPU under autocast in fp32 first, which shows more, then in bf16, which is what will run.
    """
    device, report = idx.device.type, {'scan': 'loop', 'rounding': False}
    wide, exact = next(iter(weights.values())).dtype, None  # exact: the equations in more digits
    autocast = device == 'cuda' and torch.is_autocast_enabled('cuda')

    def run(form, weights):
        return functional_call(_Form(model, form, 'decoding' not in report), weights, (weights, idx))

    def compare(loop, weights):
        try:
            return _difference(loop, run('fast', weights))
        except Exception as error:  # a swapped module may not have what the fast form reads
            return math.inf, f'{type(error).__name__}: {error}'

    for dtype in [wide, torch.bfloat16] if autocast else [wide]:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            try:
                loop = run('loop', weights)
            except Exception as error:  # of decoding, if it is gone without: an edit can be trained before it decodes
                report['decoding'] = f'{type(error).__name__}: {error}'
                loop = run('loop', weights)
            trained = {name for name, p in model.named_parameters() if p.requires_grad}
            report['unused'] = [name for name, x in loop.items() if x is None and name in trained]
            if not with_scan or 'decoding' in report:
                return report
            report['difference'], report['where'] = compare(loop, weights)
            if not report['difference'] <= TOLERANCE[dtype]:
                if dtype == torch.float64 or report['difference'] == math.inf:
                    return report
                if dtype != torch.bfloat16:
                    digits = {name: w.detach().double().requires_grad_(w.requires_grad) if w.is_floating_point() else w
                              for name, w in weights.items()}
                    exact = run('loop', digits)
                    difference, where = compare(exact, digits)
                    if not difference <= TOLERANCE[torch.float64]:  # two functions, then, not one and its rounding
                        return report | {'difference': difference, 'where': where}
                    report['rounding'] = True
                if not report['difference'] <= AMPLIFIED[dtype] * _difference(exact, loop)[0]:
                    return report
        exact = loop
    return report | {'scan': 'fast'}


def _noisy_weights_and_tokens(model, device, seed):
    """Values for the check by 'model.' and a parameter's or buffer's name, parameters first, and ids (2, T)."""
    params, generator = dict(model.named_parameters()), torch.Generator(device).manual_seed(seed)
    T = 12 if sum(p.numel() for p in params.values()) < 20_000_000 else 8
    idx = torch.randint(0, model.config.n_ids, (2, T), generator=generator, device=device)
    if model.config.eos_id is not None:
        idx[0, 2] = model.config.eos_id  # the next document starts inside a segment and a piece of truncated BPTT
    weights = {}
    for name, p in params.items():
        wide = torch.promote_types(p.dtype, torch.float32)
        scale = 0.3 if p.dim() < 2 else 0.5 * p.shape[-1] ** -0.5
        noise = torch.randn(p.shape, generator=generator, device=device, dtype=wide)
        weights[f'model.{name}'] = noise.mul_(scale).add_(p.detach()).requires_grad_()  # frozen ones too
    buffers = {f'model.{name}': x.clone() for name, x in model.named_buffers()}  # training mode may change them
    return weights | buffers, idx


def _difference(loop, fast):
    """The largest relative difference of any output of both, and in which output: (difference, where).

    It is relative to the larger of the two; of a gradient to a thousandth of all gradients where that is more, as what
    cancelling leaves is rounding.
    """
    def size(x):
        return 0.0 if x is None else torch.linalg.vector_norm(x, dtype=torch.float64).item()

    outputs = ('the states', 'the cached states', 'the loss')
    all_gradients = math.hypot(*(size(x) for name, x in loop.items() if name not in outputs))
    largest, where = 0.0, 'nothing'
    for name, x in loop.items():
        y = fast[name]
        if x is not None and y is not None and x.shape != y.shape:
            raise ValueError(f'{name} of shape {tuple(y.shape)} and not {tuple(x.shape)}')
        apart = size(x if y is None else y if x is None else y - x)
        floor = 1e-30 if name in outputs else max(1e-3 * all_gradients, 1e-30)
        difference = apart / max(size(x), size(y), floor)
        if not difference <= largest:  # a NaN is a difference too
            largest, where = difference, name if name in outputs else f'the gradient of {name}'
        if math.isnan(difference):
            break
    return largest, where
