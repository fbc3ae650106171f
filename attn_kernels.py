"""Attention patterns and fused losses: each with the plain reference that defines it, and the form that is fast.

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

A document is a range of keys, never an id per key: `doc_start[b, t]` is the position where t's document starts and does not
decrease in t, so a block of queries [i, j) needs only the keys from doc_start[i] on.

Two streams x and rho, one vector of each per position, have one such pattern for each stream's keys: here x persists (all of the
past) and rho is windowed (window = 2). Only the diagonal knows which stream asks: x comes before rho, so x_t does not see rho_t.

      k  x: 0 1 2 3 4 5   rho: 0 1 2 3 4 5
    t 0     #                  o                 '#' both x_t and rho_t see it
      1     # #                # o               'o' rho_t alone
      2     # # #              # # o
      3     # # # #            . # # o
      4     # # # # #          . . # # o
      5     # # # # # #        . . . # # o

The streams stay apart in memory: a tile of queries of both reads a triangle of one stream's keys and a short band of the other's.

A GPU runs the Triton kernels, a CPU PyTorch's operators in blocks, and C for GPN's steps. In the environment, ATTENTION=reference makes every pattern its
definition, and TRITON_INTERPRET=1 runs the kernels in Triton's interpreter on CPU.

B batch, T positions, H heads, D head size, S slots of a cache, n positions of a run, N rows, C width, V vocabulary.
"""
import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # no Triton for this platform: the PyTorch forms remain
    triton = constexpr = None
    jit = lambda kernel: kernel

REFERENCE = os.environ.get('ATTENTION') == 'reference'  # every pattern as its definition
KERNELS_ON_CPU = os.environ.get('TRITON_INTERPRET') == '1'  # Triton's interpreter: slow, for tests
COMPILE = True  # build GPN's steps in C where there is a compiler
DENSE_T = 1024  # up to this T, bf16 attention on CPU keeps its probabilities for the backward: faster (bench/attention_cpu.py), but T^2 memory
QUERY_BLOCK = 256  # queries per product on CPU: small enough to skip most of the upper triangle


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


def attention_reference(q, k, v, doc_start=None, window=None):
    """`attention` as its definition: dense scores, mask, softmax. Exact in float64, for tests and for reading."""
    position = torch.arange(q.shape[1], device=q.device)
    mask = visible(position, position, doc_start, window)
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask.unsqueeze(-3), float('-inf'))
    return torch.einsum('bhqk,bkhd->bqhd', scores.softmax(-1), v)


def attention(q, k, v, doc_start=None, window=None):
    """softmax(q k^T / sqrt(D)) v over the keys max(doc_start[t], t - window) <= k <= t.

    q, k, v (B, T, H, D); doc_start (B, T) int64 from `document_starts`, None for one document; window in positions, None for
    all. Returns (B, T, H, D).
    """
    T, on_cpu = q.shape[1], q.device.type == 'cpu'
    dense = on_cpu and q.dtype == torch.bfloat16 and T <= DENSE_T
    plain = doc_start is None and (window is None or window >= T - 1)
    if REFERENCE:
        return attention_reference(q, k, v, doc_start, window)
    if _kernels_serve(q) and not (plain and q.is_cuda):
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return _kernel_attention(q, k, v, doc_start, [window, None], 0).squeeze(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # PyTorch's attention wants (B, H, T, D)
    if plain and not dense:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    position = torch.arange(T, device=q.device)
    blocks = []
    step = QUERY_BLOCK if on_cpu else T  # elsewhere finding a block's first key would wait for the device
    for a in range(0, T, step):
        b = min(a + step, T)
        first = 0 if window is None else max(0, a - window)
        if doc_start is not None and a > 0:
            first = max(first, int(doc_start[:, a].min()))
        doc = None if doc_start is None else doc_start[:, a:b]
        mask = visible(position[a:b], position[first:b], doc, window).unsqueeze(-3)  # one mask for all heads
        attend = _dense_attention if dense else F.scaled_dot_product_attention
        blocks.append(attend(q[:, :, a:b], k[:, :, first:b], v[:, :, first:b], mask))
    return torch.cat(blocks, 2).transpose(1, 2)


def _dense_attention(q, k, v, mask):
    """Attention by two batched products; q (B, H, n, D), k, v (B, H, S, D), mask broadcast to (B, H, n, S)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, float('-inf'))
    return scores.softmax(-1).to(v.dtype) @ v


def cached_attention(q, k_cache, v_cache, positions, doc_start=None, window=None):
    """Attention of a run of new positions over a cache that already holds their keys; slot s holds position s.

    q (B, n, H, D); k_cache, v_cache (B, H, S, D); positions (B, n) int64; doc_start (B, n). Returns (B, n, H, D).
    On a GPU all S slots are read, so that shapes are static and nothing waits for the host; on CPU only the filled ones.
    """
    first, last = 0, k_cache.shape[2]
    if q.device.type == 'cpu':
        last = min(last, int(positions.max()) + 1)
        first = 0 if window is None else max(0, int(positions.min()) - window)
    mask = visible(positions, torch.arange(first, last, device=q.device), doc_start, window)
    return slot_attention(q, k_cache[:, :, first:last], v_cache[:, :, first:last], mask)


def slot_attention(q, k, v, mask):
    """Attention over the slots of a cache, in its dtype. q (B, n, H, D); k, v (B, H, S, D); mask (B, n, S). Returns (B, n, H, D)."""
    out_dtype, mask = q.dtype, mask.unsqueeze(1)
    q = q.to(k.dtype).transpose(1, 2)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16 and q.shape[2] <= 64:
        scores = (k @ (q * q.shape[-1] ** -0.5).transpose(-2, -1)).transpose(-2, -1)  # k q^T reads the keys in order, q k^T does not
        out = torch.where(mask, scores, float('-inf')).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    return out.transpose(1, 2).to(out_dtype)


STREAMS = {'input': [0], 'predict': [1], 'both': [0, 1]}  # x is stream 0, rho stream 1


def stream_windows(persistent, window, persistent_window=None):
    """[window of the x keys, window of the rho keys], None for all: persistent is 'input', 'predict' or 'both'."""
    return [persistent_window if stream in STREAMS[persistent] else window for stream in (0, 1)]


def two_stream_visible(query_pos, x_pos, rho_pos, windows, doc_start=None, queries='both'):
    """The pattern of two streams as booleans: one row of the result per query, those of x first, over [x keys | rho keys].

    query_pos, doc_start (..., n); x_pos (..., S), rho_pos (..., R): positions of the keys; windows from `stream_windows`.
    Returns (..., n or 2n, S + R).
    """
    x_keys = visible(query_pos, x_pos, doc_start, windows[0])
    rho_keys = visible(query_pos, rho_pos, doc_start, windows[1])
    earlier = rho_pos.unsqueeze(-2) < query_pos.unsqueeze(-1)  # x_t comes before rho_t
    rows = [torch.cat([x_keys, rho_keys & earlier if stream == 0 else rho_keys], -1) for stream in STREAMS[queries]]
    return torch.cat(rows, -2)


def two_stream_attention_reference(q, k, v, persistent, window, doc_start=None, persistent_window=None, queries='both'):
    """`two_stream_attention` as its definition: one softmax over all keys of both streams. Exact in float64."""
    position = torch.arange(q.shape[2], device=q.device)
    windows = stream_windows(persistent, window, persistent_window)
    mask = two_stream_visible(position, position, position, windows, doc_start, queries).unsqueeze(-3)
    q_all, k_all, v_all = (x.flatten(1, 2) for x in (q, k, v))
    scores = torch.einsum('bqhd,bkhd->bhqk', q_all, k_all) * q.shape[-1] ** -0.5
    return torch.einsum('bhqk,bkhd->bqhd', scores.masked_fill(~mask, float('-inf')).softmax(-1), v_all).view_as(q)


def two_stream_attention(q, k, v, persistent, window, doc_start=None, persistent_window=None, queries='both'):
    """Attention of two streams over the keys of both; SPS paper, eq. 5, with persistent = 'input'.

    Position t sees x_j for j <= t and rho_j for j <= t, but x_t not rho_t; of a stream that does not persist, and with
    persistent_window of the others too, only j >= t - window; nothing before doc_start[t].

    k, v (B, 2, T, H, D), stream 0 = x (input), 1 = rho (predict). q (B, 2, T, H, D), or (B, 1, T, H, D) of the one stream that
    queries = 'input' or 'predict' names. persistent 'input', 'predict' or 'both'; windows in positions, None for all;
    doc_start (B, T) int64. Returns the shape of q.
    """
    if q.shape[1] != len(STREAMS[queries]):
        raise ValueError(f"q has {q.shape[1]} streams and queries = {queries!r}: expected 2 with 'both', 1 with 'input' or 'predict'")
    if REFERENCE:
        return two_stream_attention_reference(q, k, v, persistent, window, doc_start, persistent_window, queries)
    T, windows, on_cpu = q.shape[2], stream_windows(persistent, window, persistent_window), q.device.type == 'cpu'
    if _kernels_serve(q):
        return _kernel_attention(q, k, v, doc_start, windows, STREAMS[queries][0])
    step = QUERY_BLOCK // 2 if on_cpu else 512  # positions in a tile: small enough to skip most of what the pattern leaves out
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))  # (B, streams, H, T, D)
    attend = F.scaled_dot_product_attention
    if on_cpu:
        attend = _dense_attention if T <= DENSE_T or not torch.is_grad_enabled() else _dense_attention_again
    position = torch.arange(T, device=q.device)
    tiles = []
    for a in range(0, T, step):
        b = min(a + step, T)
        document = 0 if doc_start is None or a == 0 or not on_cpu else int(doc_start[:, a].min())  # elsewhere it would wait
        x_keys, rho_keys = (slice(max(document, 0 if w is None else a - w), b) for w in windows)
        doc = None if doc_start is None else doc_start[:, a:b]
        mask = two_stream_visible(position[a:b], position[x_keys], position[rho_keys], windows, doc, queries)
        q_tile = q[:, :, :, a:b].transpose(1, 2).flatten(2, 3)  # (B, H, streams n, D)
        k_tile, v_tile = (torch.cat([x[:, 0, :, x_keys], x[:, 1, :, rho_keys]], 2) for x in (k, v))
        tiles.append(attend(q_tile, k_tile, v_tile, mask.unsqueeze(-3)).unflatten(2, (-1, b - a)))
    return torch.cat(tiles, 3).permute(0, 2, 3, 1, 4)


def _dense_attention_again(q, k, v, mask):
    """`_dense_attention` that computes its probabilities a second time in the backward instead of keeping them."""
    return checkpoint(_dense_attention, q, k, v, mask, use_reentrant=False)


# ---- attention in Triton: every pattern is a range of keys per query ----
#
# A tile of queries holds rows of one or of both streams, positions a..b of each, so that both share each load of keys. Of a key
# stream with window w it sees one unbroken range, and walks it in tiles from its very first key:
#
#     lo = max(doc_start[a], a - w)                                 hi = b + 1
#      |  left: some rows see less  |  full: no mask  |  right: the diagonal  |
#                max(doc_start[b], b - w)           a + 1
#
# Tiles outside lo..hi are never loaded. The keys' gradient walks the queries c .. min(doc_end[d], d + w + 1) in the same way.
# exp2 is used throughout: log-sum-exps are kept in base 2, with the scale 1 / sqrt(D) in them. Column blocks of D0 and D1 make
# up a head, so that a head of 70 costs 64 + 16 columns rather than 128.

@jit
def _tile_walk(lo, full_lo, full_hi, hi, N: constexpr):
    """Tiles of N that cover lo..hi: the number left of the full ones, of full ones, and right of them."""
    left = tl.cdiv(tl.minimum(tl.maximum(full_lo - lo, 0), tl.maximum(hi - lo, 0)), N)
    full = tl.maximum(full_hi - (lo + left * N), 0) // N
    return left, full, tl.cdiv(tl.maximum(hi - (lo + (left + full) * N), 0), N)


@jit
def _key_walk(a, b, start_a, start_b, window, strict_some: constexpr, strict_all: constexpr, N: constexpr):
    """Where queries a..b begin in the keys of a stream, and their `_tile_walk`. strict: a query does not see its own position."""
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
    """Both column blocks of the heads at offsets `rows` from x; zeros where `seen` is false, which MASKED says may happen."""
    x0 = _load_columns(x, rows, seen, 0, D0, D, MASKED)
    return x0, x0 if D1 == 0 else _load_columns(x, rows, seen, D0, D1, D, MASKED)


@jit
def _store(x, rows, seen, y0, y1, D: constexpr, D0: constexpr, D1: constexpr):
    tl.store(_columns(x, rows, 0, D0), y0.to(x.dtype.element_ty), mask=_in_head(seen, 0, D0, D))
    if D1 > 0:
        tl.store(_columns(x, rows, D0, D1), y1.to(x.dtype.element_ty), mask=_in_head(seen, D0, D1, D))


@jit
def _at(x, strides, b, h, stream, position, A: constexpr):
    """Where a stream's head at a position begins; 64 bits, as the whole tensor may pass 2^31 numbers. Strides are multiples of A."""
    return x + tl.multiple_of(b * strides[0] + stream * strides[1] + tl.cast(position, tl.int64) * strides[2] + h * strides[3], A)


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
def _query_tile(doc_start, b, first, T, windows, NQ: constexpr, NK: constexpr, FIRST: constexpr, N: constexpr, M: constexpr):
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
def _walked_tile(i, x, rho, M: constexpr, FULL: constexpr):
    """The i-th full or masked tile of two walks: its stream and first key."""
    if FULL:
        of_x = x[2]
    else:
        of_x = x[1] + x[3]
    stream = (i >= of_x).to(tl.int32)
    i = i - stream * of_x
    lo, left, full = tl.where(stream == 0, x[0], rho[0]), tl.where(stream == 0, x[1], rho[1]), tl.where(stream == 0, x[2], rho[2])
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
    """Scores of more keys -> their weights, what the sums so far shrink by, and the new running maximum and sum of weights."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@jit
def _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, h, position, stream, start, windows, T, scale,
                  D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, M: constexpr, FULL: constexpr):
    key_stream, n = _walked_tile(i, x, rho, M, FULL)
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
                    NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, N: constexpr, M: constexpr):
    """out and lse of a tile of N query positions; the longest tiles start first."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
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
        acc0, acc1, m, l = _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, h, position, stream, start,
                                         windows, T, scale, D, D0, D1, A, M, True)
    for i in range(0, x[1] + x[3] + rho[1] + rho[3]):
        acc0, acc1, m, l = _forward_tile(i, x, rho, acc0, acc1, m, l, q0, q1, k, v, k_strides, v_strides, b, h, position, stream, start,
                                         windows, T, scale, D, D0, D1, A, M, False)
    l = tl.where(seen, l, 1.0)
    rows = _rows(out_strides, part, row % N, A)
    _store(_at(out, out_strides, b, h, 0, first, A), rows, seen, acc0 / l[:, None], acc1 / l[:, None], D, D0, D1)
    tl.store(lse + ((b * NQ + part) * H + h) * T + position, m + tl.log2(l), mask=seen)


@jit
def _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, lse, delta, k, v, k_strides, v_strides, b, h, position, stream, start,
                         windows, T, scale, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, M: constexpr, FULL: constexpr):
    key_stream, n = _walked_tile(i, x, rho, M, FULL)
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
def _query_gradient_kernel(q, k, v, out, grad, lse, delta, dq, doc_start, q_strides, k_strides, v_strides, out_strides, grad_strides,
                           dq_strides, windows, T, H, scale, NQ: constexpr, NK: constexpr, FIRST: constexpr,
                           D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, N: constexpr, M: constexpr):
    """dq of a tile of N query positions, and delta = sum(out * grad), which the keys' gradient needs too."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * N
    row = tl.arange(0, NQ * N)
    part, position = row // N, first + row % N
    stream, seen = FIRST + part, position < T
    start = tl.zeros_like(position)
    if doc_start is not None:
        start = tl.load(doc_start + b * T + position, mask=seen, other=0).to(tl.int32)
    x, rho = _query_tile(doc_start, b, first, T, windows, NQ, NK, FIRST, N, M)
    q0, q1 = _load(_at(q, q_strides, b, h, 0, first, A), _rows(q_strides, part, row % N, A), seen, D, D0, D1, True)
    o0, o1 = _load(_at(out, out_strides, b, h, 0, first, A), _rows(out_strides, part, row % N, A), seen, D, D0, D1, True)
    g0, g1 = _load(_at(grad, grad_strides, b, h, 0, first, A), _rows(grad_strides, part, row % N, A), seen, D, D0, D1, True)
    row_delta = tl.sum(o0.to(tl.float32) * g0.to(tl.float32), 1)
    if D1 > 0:
        row_delta += tl.sum(o1.to(tl.float32) * g1.to(tl.float32), 1)
    statistic = ((b * NQ + part) * H + h) * T + position
    tl.store(delta + statistic, row_delta, mask=seen)
    row_lse = tl.load(lse + statistic, mask=seen, other=float('inf'))

    acc0 = tl.zeros((NQ * N, D0), tl.float32)
    acc1 = acc0 if D1 == 0 else tl.zeros((NQ * N, D1), tl.float32)
    for i in range(0, x[2] + rho[2]):
        acc0, acc1 = _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, row_lse, row_delta, k, v, k_strides, v_strides, b, h,
                                          position, stream, start, windows, T, scale, D, D0, D1, A, M, True)
    for i in range(0, x[1] + x[3] + rho[1] + rho[3]):
        acc0, acc1 = _query_gradient_tile(i, x, rho, acc0, acc1, q0, q1, g0, g1, row_lse, row_delta, k, v, k_strides, v_strides, b, h,
                                          position, stream, start, windows, T, scale, D, D0, D1, A, M, False)
    rows = _rows(dq_strides, part, row % N, A)
    scale /= 1.4426950408889634  # d exp2(s log2(e)) = d exp(s)
    _store(_at(dq, dq_strides, b, h, 0, first, A), rows, seen, acc0 * scale, acc1 * scale, D, D0, D1)


@jit
def _key_gradient_tile(n, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta, q_strides, grad_strides, b, h, key, end, window,
                       key_stream, T, H, scale, NQ: constexpr, FIRST: constexpr, D: constexpr, D0: constexpr, D1: constexpr, A: constexpr,
                       N: constexpr, FULL: constexpr):
    row = tl.arange(0, NQ * N)
    part, position = row // N, n + row % N
    seen = position < T
    q0, q1 = _load(_at(q, q_strides, b, h, 0, n, A), _rows(q_strides, part, row % N, A), seen, D, D0, D1, not FULL)
    g0, g1 = _load(_at(grad, grad_strides, b, h, 0, n, A), _rows(grad_strides, part, row % N, A), seen, D, D0, D1, not FULL)
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
def _key_gradient_kernel(q, k, v, grad, lse, delta, dk, dv, doc_end, q_strides, k_strides, v_strides, grad_strides, dk_strides,
                         windows, T, H, scale, NQ: constexpr, NK: constexpr, FIRST: constexpr,
                         D: constexpr, D0: constexpr, D1: constexpr, A: constexpr, N: constexpr, M: constexpr):
    """dk and dv of a tile of M keys of one stream, walking the queries that see them in tiles of N positions."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
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
    k0, k1 = _load(_at(k, k_strides, b, h, key_stream, c, A), _rows(k_strides, 0, tl.arange(0, M), A), seen, D, D0, D1, True)
    v0, v1 = _load(_at(v, v_strides, b, h, key_stream, c, A), _rows(v_strides, 0, tl.arange(0, M), A), seen, D, D0, D1, True)

    dk0 = tl.zeros((M, D0), tl.float32)
    dv0 = tl.zeros((M, D0), tl.float32)
    dk1 = dk0 if D1 == 0 else tl.zeros((M, D1), tl.float32)
    dv1 = dv0 if D1 == 0 else tl.zeros((M, D1), tl.float32)
    for i in range(0, full):
        dk0, dk1, dv0, dv1 = _key_gradient_tile(lo + (left + i) * N, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta, q_strides,
                                                grad_strides, b, h, key, end, window, key_stream, T, H, scale, NQ, FIRST, D, D0, D1, A, N, True)
    for i in range(0, left + right):
        n = lo + (i + tl.where(i >= left, full, 0)) * N
        dk0, dk1, dv0, dv1 = _key_gradient_tile(n, dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, grad, lse, delta, q_strides,
                                                grad_strides, b, h, key, end, window, key_stream, T, H, scale, NQ, FIRST, D, D0, D1, A, N, False)
    scale /= 1.4426950408889634
    rows = _rows(dk_strides, 0, tl.arange(0, M), A)
    _store(_at(dk, dk_strides, b, h, key_stream, c, A), rows, seen, dk0 * scale, dk1 * scale, D, D0, D1)
    _store(_at(dv, dk_strides, b, h, key_stream, c, A), rows, seen, dv0, dv1, D, D0, D1)


# (query rows, keys, warps, stages) of a tile by pass, per architecture, largest head size and dtype: `python -m bench.attention --tune` proposes rows
TILES = {
    ('sm_90', 64, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 3), 'key_gradient': (64, 128, 8, 2)},
    ('sm_90', 96, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 2), 'key_gradient': (32, 128, 8, 2)},
    ('sm_90', 128, 16): {'forward': (128, 64, 8, 3), 'query_gradient': (128, 64, 8, 2), 'key_gradient': (64, 64, 8, 2)},
    ('sm_90', 64, 32): {'forward': (32, 32, 8, 2), 'query_gradient': (32, 32, 4, 2), 'key_gradient': (32, 32, 8, 1)},
    ('sm_90', 128, 32): {'forward': (32, 16, 8, 1), 'query_gradient': (16, 16, 8, 1), 'key_gradient': (16, 16, 8, 1)},
    ('cpu', 128, 32): {'forward': (64, 32, 1, 1), 'query_gradient': (32, 64, 1, 1), 'key_gradient': (64, 32, 1, 1)},
}


@functools.cache
def _architecture(device):
    """The rows of `TILES` for a device: an unknown GPU takes those of sm_90."""
    name = 'sm_{}{}'.format(*torch.cuda.get_device_capability(device)) if device.type == 'cuda' else device.type
    return name if any(name == known for known, *_ in TILES) else 'sm_90'


def tiles(device, head_size, dtype, kind, streams=1):
    """The tile of a pass: (query positions, keys, warps, stages)."""
    arch = _architecture(device)
    bits = 32 if arch == 'cpu' else torch.finfo(dtype).bits
    largest = min(D for known, D, b in TILES if known == arch and b == bits and D >= head_size)
    rows, keys, warps, stages = TILES[arch, largest, bits][kind]
    return rows // streams, keys, warps, stages


def column_blocks(head_size):
    """Head size as two powers of two, 16 or more: (64, 16) for 70; the second is 0 where one is enough."""
    first = max(16, 1 << head_size.bit_length() - 1)
    rest = head_size - first
    return first, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


def _launch(kernel, kind, tensors, strided, q, k, windows, first):
    """Runs an attention kernel over all heads and tiles of q (B, NQ, T, H, D), k (B, NK, T, H, D)."""
    (B, NQ, T, H, D), NK = q.shape, k.shape[1]
    N, M, warps, stages = tiles(q.device, D, q.dtype, kind, NQ)
    D0, D1 = column_blocks(D)
    grid = B * H, NK * triton.cdiv(T, M) if kind == 'key_gradient' else triton.cdiv(T, N)
    strides = [x.stride()[:4] for x in strided]
    A = math.gcd(16, *(stride for x in strides for stride in x))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[grid](*tensors, *strides, tuple(windows), T, H, D ** -0.5 * math.log2(math.e), NQ, NK, first, D, D0, D1, A, N, M,
                     num_warps=warps, num_stages=stages)


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_start: torch.Tensor | None, windows: list[int],
                      first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, NQ, T, H, D), k, v (B, NK, T, H, D) -> out as q, log-sum-exps in base 2 (B, NQ, H, T) fp32.

    windows: one for each stream of keys, at most T; first: the stream of the first queries, 0 for x, 1 for rho.
    """
    B, NQ, T, H, D = q.shape
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    lse = torch.empty(B, NQ, H, T, device=q.device, dtype=torch.float32)
    _launch(_forward_kernel, 'forward', (q, k, v, out, lse, doc_start), (q, k, v, out), q, k, windows, first)
    return out, lse


def attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                       doc_start: torch.Tensor | None, windows: list[int],
                       first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v from grad, that of out. Deterministic: each number is summed by one program."""
    T, delta = q.shape[2], torch.empty_like(lse)
    dq, dk, dv = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))
    doc_end = None
    if doc_start is not None:  # the first position whose document starts later
        doc_end = torch.searchsorted(doc_start, torch.arange(T, device=q.device).expand_as(doc_start).contiguous(), right=True)
    _launch(_query_gradient_kernel, 'query_gradient', (q, k, v, out, grad, lse, delta, dq, doc_start), (q, k, v, out, grad, dq), q, k, windows, first)
    _launch(_key_gradient_kernel, 'key_gradient', (q, k, v, grad, lse, delta, dk, dv, doc_end), (q, k, v, grad, dk), q, k, windows, first)
    return dq, dk, dv


_attention_op = torch.library.custom_op('attn_kernels::attention', attention_forward, mutates_args=())
_attention_backward_op = torch.library.custom_op('attn_kernels::attention_backward', attention_backward, mutates_args=())


@_attention_op.register_fake
def _(q, k, v, doc_start, windows, first):
    B, NQ, T, H, D = q.shape
    return torch.empty(q.shape, device=q.device, dtype=q.dtype), torch.empty(B, NQ, H, T, device=q.device, dtype=torch.float32)


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


def _kernels_serve(q):
    """Whether the Triton kernels run for this tensor."""
    return triton is not None and (q.is_cuda or KERNELS_ON_CPU) and q.shape[-1] <= 128 and q.dtype != torch.float64


def _kernel_attention(q, k, v, doc_start, windows, first):
    """The Triton kernels on q (B, NQ, T, H, D), k, v (B, NK, T, H, D); windows in positions, None for all, one for each stream of keys."""
    T = q.shape[2]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    doc_start = None if doc_start is None else doc_start.contiguous()
    windows = [T if w is None else min(w, T) for w in windows]
    return _attention_op(q, k, v, doc_start, windows, first)[0]


# ---- decoding in Triton: a run of new positions over a cache, up to 16 query rows ----
#
# Each program takes one head of one row of the batch and a share of the cache's filled slots; `_combine_kernel` merges the shares.
# The run's own keys come from registers: the program of the first share rotates them, writes them to the cache and attends to
# them there and then, so that nobody waits for the write. A cache is [ring of R slots | memory], as model_sps.Cache describes;
# without a ring R is 0. Every size is fixed by the shapes, so that a step can be a CUDA graph.

@jit
def _load_halves(x, rows, seen, D: constexpr, HALF: constexpr):
    mask = _in_head(seen, 0, HALF, D // 2)
    return tl.load(_columns(x, rows, 0, HALF), mask=mask, other=0.0), tl.load(_columns(x, rows, D // 2, HALF), mask=mask, other=0.0)


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
def _decode_kernel(q, k, v, k_cache, v_cache, out, shares, statistics, positions, slots, doc_start, ring_positions, cos, sin, slots_stride,
                   q_strides, k_strides, v_strides, cache_strides, windows, H, R, scale,
                   n: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, RING_STREAM: constexpr, READS_RING: constexpr,
                   READS_MEMORY: constexpr, D: constexpr, HALF: constexpr, WIDE: constexpr, A: constexpr, M: constexpr):
    """One share of a head's slots: out itself if there is only one, else shares and statistics. n positions of NQ and NK streams."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    share, n_shares = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, 16)
    asks, stream, i = row < NQ * n, FIRST + row // n, row % n
    t = tl.load(positions + b * n + i).to(tl.int32)
    first = tl.zeros_like(t)
    if doc_start is not None:
        first = tl.load(doc_start + b * n + i).to(tl.int32)
    start = tl.load(positions + b * n).to(tl.int32)  # tokens before the run
    qa, qb = _rotated_halves(_at(q, q_strides, b, h, 0, 0, A), _rows(q_strides, row // n, i, A), asks, t, cos, sin, D, HALF)
    qa, qb = qa.to(k_cache.dtype.element_ty), qb.to(k_cache.dtype.element_ty)
    k_cache, v_cache = _at(k_cache, cache_strides, b, h, 0, 0, A), _at(v_cache, cache_strides, b, h, 0, 0, A)
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
            position = tl.where(in_ring, tl.load(ring_positions + b * (R + 1) + slot, mask=there & in_ring, other=0), position)
        key_first = tl.maximum(first, t - tl.where(in_ring, ring_window, memory_window))
        mask = (there & (position < start))[None, :] & (position[None, :] >= key_first[:, None])
        rows = _rows(cache_strides, 0, slot, A)
        ka, kb = _load_halves(k_cache, rows, there, D, HALF)
        values = _load_columns(v_cache, rows, there, 0, WIDE, D, True)
        acc, m, l = _decode_tile(acc, m, l, qa, qb, ka, kb, values, mask, scale)

    if share == 0:  # the run itself
        new, key_stream = row < NK * n, row // n
        slot = tl.load(slots + b * slots_stride + row, mask=new, other=0)
        ka, kb = _rotated_halves(_at(k, k_strides, b, h, 0, 0, A), _rows(k_strides, key_stream, i, A), new, t, cos, sin, D, HALF)
        ka, kb = ka.to(k_cache.dtype.element_ty), kb.to(k_cache.dtype.element_ty)
        values = _load_columns(_at(v, v_strides, b, h, 0, 0, A), _rows(v_strides, key_stream, i, A), new, 0, WIDE, D, True)
        values = values.to(v_cache.dtype.element_ty)
        rows = _rows(cache_strides, 0, slot, A)
        _store_halves(k_cache, rows, new, ka, kb, D, HALF)
        tl.store(_columns(v_cache, rows, 0, WIDE), values, mask=_in_head(new, 0, WIDE, D))
        window = tl.where(key_stream == 0, windows[0], windows[1])
        last = t[:, None] - ((stream == 0)[:, None] & (key_stream == 1)[None, :]).to(tl.int32)
        mask = new[None, :] & (t[None, :] <= last) & (t[None, :] >= tl.maximum(first[:, None], t[:, None] - window[None, :]))
        acc, m, l = _decode_tile(acc, m, l, qa, qb, ka, kb, values, mask, scale)

    if n_shares == 1:
        _store_decoded(out, acc, l, b, h, H, row, asks, n, NQ, D, WIDE)
    else:
        at = (tl.program_id(0) * n_shares + share).to(tl.int64) * 16 + row
        tl.store(_columns(shares, at * WIDE, 0, WIDE), acc)
        tl.store(statistics + at * 2, m)
        tl.store(statistics + at * 2 + 1, l)


@jit
def _store_decoded(out, acc, l, b, h, H, row, asks, n: constexpr, NQ: constexpr, D: constexpr, WIDE: constexpr):
    """out (B, NQ, n, H, D) of one head."""
    acc /= tl.where(asks, l, 1.0)[:, None]
    rows = ((b * NQ * n + row) * H + h) * D
    tl.store(_columns(out, rows, 0, WIDE), acc.to(out.dtype.element_ty), mask=_in_head(asks, 0, WIDE, D))


@jit
def _combine_kernel(shares, statistics, out, H, n_shares, n: constexpr, NQ: constexpr, D: constexpr, WIDE: constexpr):
    """Merges the shares of one head."""
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
    _store_decoded(out, acc, l, (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, H, row, row < NQ * n, n, NQ, D, WIDE)


DECODE_KEYS = 64  # of a tile
DECODE_SHARE = 256  # slots of the cache that a program is worth
DECODE_PROGRAMS = 264  # enough for an H100's 132 multiprocessors


def decode_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor,
                   sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, doc_start: torch.Tensor | None,
                   ring_positions: torch.Tensor | None, windows: list[int], first: int, ring_stream: int, reads: str) -> torch.Tensor:
    (B, NQ, n, H, D), NK = q.shape, k.shape[1]
    S, R = k_cache.shape[2], 0 if ring_positions is None else ring_positions.shape[1] - 1
    n_shares = max(1, min(DECODE_PROGRAMS // (B * H), S // DECODE_SHARE))
    half, wide = (max(16, triton.next_power_of_2(d)) for d in (D // 2, D))
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    shares = torch.empty(B * H, n_shares, 16, wide, device=q.device, dtype=torch.float32)
    statistics = torch.empty(B * H, n_shares, 16, 2, device=q.device, dtype=torch.float32)
    strides = [x.stride()[:4] for x in (q, k, v)] + [(k_cache.stride(0), 0, k_cache.stride(2), k_cache.stride(1))]
    A = math.gcd(16, *(stride for x in strides for stride in x))
    keys = DECODE_KEYS if D % 16 == 0 else DECODE_KEYS // 2  # halves that do not start on 16 bytes go through registers
    with torch.cuda.device_of(q):
        _decode_kernel[B * H, n_shares](
            q, k, v, k_cache, v_cache, out, shares, statistics, positions, slots, doc_start, ring_positions, cos, sin, slots.stride(0),
            *strides, tuple(windows), H, R, D ** -0.5 * math.log2(math.e),
            n, NQ, NK, first, ring_stream, reads != 'memory', reads != 'ring', D, half, wide, A, keys, num_warps=4,
            num_stages=2 if q.dtype == torch.float32 else 3)
        if n_shares > 1:
            _combine_kernel[B * H,](shares, statistics, out, H, n_shares, n, NQ, D, wide, num_warps=4, num_stages=2)
    return out


_decode_op = torch.library.custom_op('attn_kernels::decode', decode_forward, mutates_args=('k_cache', 'v_cache'))


@_decode_op.register_fake
def _(q, *args):
    return torch.empty(q.shape, device=q.device, dtype=q.dtype)


def decodes(cache, rows):
    """Whether `decode_attention` serves a run of so many query rows over this cache (a tensor)."""
    return _kernels_serve(cache) and not REFERENCE and rows <= 16


def decode_attention(q, k, v, k_cache, v_cache, rope, positions, slots, doc_start, windows, *, queries='both', ring_positions=None,
                     ring_stream=1, reads='both'):
    """Rotates a run's queries and keys, writes keys and values to the cache, and attends over what the cache then holds.

    q (B, NQ, n, H, D), k, v (B, NK, n, H, D) of the streams at work, NQ n and NK n at most 16; k_cache, v_cache (B, H, S, D),
    [ring of R slots | memory]; rope: tables of all positions; positions (B, n) int64 of the run; slots (B, NK, n) that take its keys;
    doc_start (B, n) or None; windows: of x and rho, None for all. ring_positions (B, R + 1): what each ring slot holds, None without
    a ring; ring_stream: the stream whose keys are there; reads: 'ring', 'memory' or 'both'.
    Returns (B, NQ, n, H, D).
    """
    windows = [2 ** 31 - 1 if w is None else w for w in windows]
    doc_start = None if doc_start is None else doc_start.contiguous()
    return _decode_op(q, k, v, k_cache, v_cache, *rope, positions.contiguous(), slots, doc_start, ring_positions, windows,
                      STREAMS[queries][0], ring_stream, reads)


def rms_norm_reference(x, weight, eps):
    """`rms_norm` as its definition."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x (..., C), weight (C,); keeps x's dtype, computes in fp32 at least.

    Under autocast the result already has the dtype that the product after it wants.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _RMSNorm.apply(x, weight, eps, dtype) if torch.is_grad_enabled() else _rms_norm(x, weight, eps, dtype)[0]


def _rms_norm(x, weight, eps, dtype):
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    r = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = x * r * weight  # for torch.compile of PyTorch 2.11 the result must be neither from an in-place operator nor a no-op `to`: it loses the gradient
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


def rope_table(positions, head_size, theta):
    """cos and sin, fp32, of the rotary angles position * theta^(-2j/D), j < D/2. positions (...) -> two of (..., 1, D/2)."""
    j = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None, None] * theta ** (-j / head_size)
    return angles.cos(), angles.sin()


def rotate_reference(x, cos, sin):
    """`rotate` as its definition."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding: turns each pair (x_j, x_{j + D/2}) by its angle, the layout of Hugging Face Llama.

    x (..., T, H, D) of any dtype; cos, sin from `rope_table`, (T, 1, D/2) or whatever broadcasts to (..., T, H, D/2).
    """
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


def _rotate(x, cos, sin):
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    y = torch.empty_like(x)
    y_a, y_b = y.chunk(2, -1)
    y_a.copy_((a * cos).addcmul_(b, sin, value=-1))
    y_b.copy_((b * cos).addcmul_(a, sin))
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


def linear_cross_entropy_reference(hidden, weight, targets, row_weights=None):
    """`linear_cross_entropy` as its definition, with all logits in memory."""
    logits = (hidden @ weight.T).float()
    if row_weights is None:
        return F.cross_entropy(logits, targets, ignore_index=-1)
    return (row_weights * F.cross_entropy(logits, targets, ignore_index=-1, reduction='none')).sum()


def linear_cross_entropy(hidden, weight, targets, max_logits=2 ** 26, row_weights=None):
    """Mean negative log-likelihood in nats of targets under softmax(hidden weight^T), without holding all logits.

    hidden (N, C), weight (V, C), targets (N,) int64 with -1 for rows that do not count; at most max_logits logits exist at a
    time. Products run in the autocast dtype, the softmax in fp32. Returns a scalar; 0 if no row counts. With row_weights (N,) it is
    the sum of row_weights times the rows' negative log-likelihoods.
    """
    return _fused_losses(hidden.unsqueeze(0), weight, targets, row_weights, None, True, max_logits)[0]


def linear_cross_entropy_kl_reference(states, weight, targets, counts, head_frozen=True):
    """`linear_cross_entropy_kl` as its definition, with all logits in memory."""
    nll = linear_cross_entropy_reference(states[0], weight, targets)
    p = (states[0] @ weight.T).detach().log_softmax(-1)
    q = (states[1:] @ (weight.detach() if head_frozen else weight).T).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1) * counts
    return nll, (kl.sum(1) / counts.sum(1).clamp(min=1)).mean()


def linear_cross_entropy_kl(states, weight, targets, counts, head_frozen=True, max_logits=2 ** 26):
    """Cross-entropy of states[0] and the Kullback-Leibler divergence of its softmax from those of the guesses states[1:].

    states (1 + d, N, C); weight, targets, max_logits as in `linear_cross_entropy`, whose value is the first of the two results.
    The second is the mean over d of the mean over the rows that counts (d, N) marks of KL(p || q_i), p = softmax(states[0] weight^T)
    and q_i = softmax(states[i] weight^T). Nothing of it is learned by p; by the weight through the q_i, unless head_frozen.
    """
    return _fused_losses(states, weight, targets, None, counts, head_frozen, max_logits)


def _fused_losses(states, weight, targets, row_weights, counts, head_frozen, max_logits):
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    chunk_rows = max(1, max_logits // (256 * weight.shape[0] * len(states))) * 256  # whole tiles of the products
    with_grad = torch.is_grad_enabled()  # autograd does not tell the function below
    return _FusedLosses.apply(states, weight, targets, row_weights, counts, head_frozen, dtype, chunk_rows, with_grad)


class _FusedLosses(torch.autograd.Function):
    """The gradient is formed in the forward, while a chunk's logits are at hand: three products, where recomputing takes four."""

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
                    if on_cpu and not torch.compiler.is_compiling() and p_target.min() > 1e-30:
                        nll = -p_target.log()
                    else:  # the target's probability may underflow, the largest one cannot
                        nll = _log_sum_exp(part[0], p) - part[0].gather(1, index).squeeze(1)
                    loss += (nll * by_row[here]).sum()
                    for i in range(1, S):  # KL = sum p (log p - log q), and its gradient by q's logits is q - p
                        q = torch.softmax(part[i], -1, dtype=softmax_dtype)
                        divergence = (p * (part[0].to(p.dtype) - part[i])).sum(-1) - _log_sum_exp(part[0], p) + _log_sum_exp(part[i], q)
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
                    part = logits[0].T @ h_counted[rows]
                    grad_w = part.to(weight.dtype) if grad_w is None else grad_w.add_(part)
                    if S > 1 and not head_frozen:
                        part = logits[1:].flatten(0, 1).T @ chunk[logits.shape[1]:]
                        kl_grad_w = part.to(weight.dtype) if kl_grad_w is None else kl_grad_w.add_(part)
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


def _log_sum_exp(logits, p):
    """From logits (n, V) and their softmax p (n, V): (n,)."""
    return logits.amax(-1).to(p.dtype) - p.amax(-1).log()


# ---- GPN's steps: what is between their products ----
#
# On a GPU each piece is one Triton kernel, elsewhere PyTorch's operators; the C functions at the end of this file are whole segments of
# steps. Arithmetic is in fp32 at least, products z may be of less. Rows N, a product's columns in the order that `heads` and `glu` say.

@functools.cache
def _constant(value, device, dtype):
    return torch.full((), value, device=device, dtype=dtype)


def unit(x, eps):
    """x / sqrt(|x|^2 + eps^2) over the last axis, and what it was divided by: the RMSNorm and the L2 norm, but for a constant."""
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _constant(eps, x.device, x.dtype))
    return x / length, length


def unit_gradient(grad, y, inverse):
    """The gradient of y = `unit`(x) with respect to x; inverse is 1 / its length, and may be 0 where x was cut by a ReLU."""
    return torch.addcmul(grad, y, (y * grad).sum(-1, keepdim=True), value=-1).mul_(inverse)


def gate(z, x, add, eps, dtype):
    """y = sigmoid(z) x + add, and `unit`(y) in dtype. x (N, C) in fp32 or float64; z and add (N, C), z may be part of a product."""
    if _gpn_kernels_serve(x):
        y, direction = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        _launch_gpn(_gate_kernel, (len(x),), 8, x, z, add.contiguous(), y, direction, x.shape[1], z.stride(0), eps, triton.next_power_of_2(x.shape[1]))
        return y, direction
    y = torch.addcmul(add.to(x.dtype), torch.sigmoid(z.to(x.dtype)), x)
    return y, unit(y, eps)[0].to(dtype)


def gate_gradient(grad, direction, inverse, grad_y, opened):
    """The gradient of x (N, C), from grad, that of direction = `unit`(x), and grad_y, that of opened x; opened is sigmoid(z)."""
    if _gpn_kernels_serve(grad_y):
        out = torch.empty_like(grad_y)
        C = out.shape[1]
        _launch_gpn(_gate_gradient_kernel, (len(out),), 8, out, grad, direction, inverse, grad_y, opened, C, triton.next_power_of_2(C))
        return out
    return torch.addcmul(unit_gradient(grad.to(grad_y.dtype), direction, inverse), grad_y, opened)


def glu(z, answer, eps, dtype):
    """silu(z1) * (z2, `unit`(answer)) in dtype. z (N, Y + F) of z1 (N, Y) and z2 (N, F); answer (N, Y - F) in fp32, or None where Y = F."""
    n = 0 if answer is None else answer.shape[1]
    Y = (z.shape[1] + n) // 2
    if _gpn_kernels_serve(z):
        y = z.new_empty(len(z), Y, dtype=dtype)
        _launch_gpn(_glu_kernel, (len(z),), 8, z, answer, y, Y, n, z.stride(0), eps, triton.next_power_of_2(Y - n), triton.next_power_of_2(n))
        return y
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    other = z[:, Y:] if answer is None else torch.cat([z[:, Y:], unit(answer, eps)[0]], 1)
    return (F.silu(z[:, :Y]) * other).to(dtype)


def glu_gradient(grad, z, answer, eps, out, y):
    """From grad (N, Y), of what `glu` gives: the gradient of z in out, `glu` itself in y; returns the gradient of answer."""
    n, wide = 0 if answer is None else answer.shape[1], torch.promote_types(z.dtype, torch.float32)
    Y = (z.shape[1] + n) // 2
    if _gpn_kernels_serve(z):
        grad_answer = None if answer is None else torch.empty_like(answer, dtype=wide)
        _launch_gpn(_glu_gradient_kernel, (len(z),), 8, z, answer, grad, out, y, grad_answer, Y, n, z.stride(0), out.stride(0), eps,
                    triton.next_power_of_2(Y - n), triton.next_power_of_2(n))
        return grad_answer
    grad, z1, other = grad.to(wide), z[:, :Y].to(wide), z[:, Y:].to(wide)
    if answer is not None:
        direction, length = unit(answer.to(wide), eps)
        other = torch.cat([other, direction], 1)
    half = torch.sigmoid(z1)
    whole = half * z1
    torch.mul(whole, other, out=y)
    torch.mul(grad * other, torch.addcmul(half, whole, 1 - half), out=out[:, :Y])
    grad_other = grad * whole
    out[:, Y:] = grad_other[:, :Y - n]
    return None if answer is None else unit_gradient(grad_other[:, Y - n:], direction, 1 / length)


def heads(z, rate, n_head, d_k, eps):
    """What the memory is asked and written with, eq. 8 and 9: q, k (N, H, K), v (N, H, D), decay and beta (N, H), from the columns
    query HK, key HK, value HD, beta H, decay H of z. Without a rate (H,) the columns are the query alone, and so is what comes back."""
    wide = torch.promote_types(z.dtype, torch.float32)
    if _gpn_kernels_serve(z):
        d_v = 0 if rate is None else z.shape[1] // n_head - 2 * d_k - 2
        new = lambda *shape: z.new_empty(len(z), n_head, *shape, dtype=wide)
        q, *others = [new(d_k), new(d_k), new(d_v), new(), new()] if d_v else [new(d_k), *[None] * 4]
        sizes = d_k, d_v, triton.next_power_of_2(d_k), triton.next_power_of_2(max(d_v, 1))
        _launch_gpn(_heads_kernel, (len(z), n_head), 1, z, rate, q, *others, n_head, z.stride(0), eps, *sizes)
        return q, *others
    z = z.to(wide)
    if rate is None:
        return unit(F.relu(z.unflatten(-1, (n_head, d_k))), eps)[0], *[None] * 4
    keys, v, beta, decay = z.tensor_split([2 * n_head * d_k, z.shape[1] - 2 * n_head, z.shape[1] - n_head], -1)
    q, k = unit(F.relu(keys.unflatten(-1, (-1, d_k))), eps)[0].split(n_head, 1)
    return q, k, v.unflatten(-1, (n_head, -1)), torch.exp(-rate * F.softplus(decay)), torch.sigmoid(beta)


def heads_gradient(z, rate, eps, out, grad_q, grad_k=None, grad_v=None, grad_beta=None, grad_log=None):
    """The gradient of z in out, from those of what `heads` gives, grad_log that of decay's logarithm; returns that of rate for each row
    (N, H), or None without a rate."""
    n_head, d_k = grad_q.shape[1:]
    if _gpn_kernels_serve(z):
        grad_rate, d_v = None if rate is None else torch.empty_like(grad_log), 0 if rate is None else grad_v.shape[-1]
        sizes = d_k, d_v, triton.next_power_of_2(d_k), triton.next_power_of_2(max(d_v, 1))
        _launch_gpn(_heads_gradient_kernel, (len(z), n_head), 1, z, rate, grad_q, grad_k, grad_v, grad_beta, grad_log, out, grad_rate, n_head,
                    z.stride(0), out.stride(0), eps, *sizes)
        return grad_rate
    z, grad_keys = z.to(grad_q.dtype), grad_q if rate is None else torch.cat([grad_q, grad_k], 1)
    n = grad_keys[0].numel()
    cut = F.relu(z[:, :n].unflatten(-1, (-1, d_k)))
    keys, length = unit(cut, eps)
    out[:, :n] = unit_gradient(grad_keys, keys, (cut > 0) / length).flatten(1)
    if rate is None:
        return None
    beta, decay = torch.sigmoid(z[:, -2 * n_head:-n_head]), z[:, -n_head:]
    out[:, n:-2 * n_head] = grad_v.flatten(1)
    torch.mul(grad_beta, beta * (1 - beta), out=out[:, -2 * n_head:-n_head])
    torch.mul(grad_log, -rate * torch.sigmoid(decay), out=out[:, -n_head:])
    return -grad_log * F.softplus(decay)


def _gpn_kernels_serve(x):
    return triton is not None and not REFERENCE and (x.is_cuda or KERNELS_ON_CPU) and x.dtype != torch.float64 and x.numel() > 0


def _launch_gpn(kernel, grid, warps, *args):
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, num_warps=warps, num_stages=1)


@jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    more = 1 + small
    return tl.maximum(x, 0) + tl.where(more == 1, small, tl.log(more) * small / (more - 1))  # log(1 + small), exact for a small one


@jit
def _read(x, i, seen):
    return tl.load(x + i, mask=seen, other=0.0).to(tl.float32)


@jit
def _gate_kernel(x, z, add, y, direction, C, z_stride, eps, BLOCK: constexpr):
    """A row of `gate`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, seen = row * C + i, i < C
    out = _read(add, at, seen) + tl.sigmoid(_read(z, row * z_stride + i, seen)) * _read(x, at, seen)
    tl.store(y + at, out, mask=seen)
    tl.store(direction + at, out / tl.sqrt(tl.sum(out * out, 0) + eps * eps), mask=seen)


@jit
def _gate_gradient_kernel(out, grad, direction, inverse, grad_y, opened, C, BLOCK: constexpr):
    """A row of `gate_gradient`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, seen = row * C + i, i < C
    g, n = _read(grad, at, seen), _read(direction, at, seen)
    g = (g - n * tl.sum(g * n, 0)) * tl.load(inverse + row)
    tl.store(out + at, g + _read(grad_y, at, seen) * _read(opened, at, seen), mask=seen)


@jit
def _glu_kernel(z, answer, y, Y, N, z_stride, eps, BLOCK: constexpr, ANSWERS: constexpr):
    """A row of `glu`; N of its Y columns are from the answer."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    z, y, seen = z + row * z_stride, y + row * Y, i < Y - N
    z1 = _read(z, i, seen)
    tl.store(y + i, z1 * tl.sigmoid(z1) * _read(z, Y + i, seen), mask=seen)
    if answer is not None:
        j = tl.arange(0, ANSWERS)
        read = _read(answer, row * N + j, j < N)
        z1 = _read(z, Y - N + j, j < N)
        tl.store(y + Y - N + j, z1 * tl.sigmoid(z1) * read / tl.sqrt(tl.sum(read * read, 0) + eps * eps), mask=j < N)


@jit
def _glu_gradient_kernel(z, answer, grad, out, y, grad_answer, Y, N, z_stride, out_stride, eps, BLOCK: constexpr, ANSWERS: constexpr):
    """A row of `glu_gradient`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    z, grad, out, y, seen = z + row * z_stride, grad + row * Y, out + row * out_stride, y + row * Y, i < Y - N
    z1, other, g = _read(z, i, seen), _read(z, Y + i, seen), _read(grad, i, seen)
    half = tl.sigmoid(z1)
    tl.store(y + i, half * z1 * other, mask=seen)
    tl.store(out + i, g * other * half * (1 + z1 * (1 - half)), mask=seen)
    tl.store(out + Y + i, g * half * z1, mask=seen)
    if answer is not None:
        j = tl.arange(0, ANSWERS)
        seen = j < N
        read, z1, g = _read(answer, row * N + j, seen), _read(z, Y - N + j, seen), _read(grad, Y - N + j, seen)
        inverse, half = 1 / tl.sqrt(tl.sum(read * read, 0) + eps * eps), tl.sigmoid(z1)
        read *= inverse
        tl.store(y + Y - N + j, half * z1 * read, mask=seen)
        tl.store(out + Y - N + j, g * read * half * (1 + z1 * (1 - half)), mask=seen)
        g *= half * z1
        tl.store(grad_answer + row * N + j, (g - read * tl.sum(g * read, 0)) * inverse, mask=seen)


@jit
def _unit_key(z, i, seen, eps):
    """The key or query of a row of z, where it is cut, and 1 / what it was divided by."""
    x = _read(z, i, seen)
    x = tl.where(x < 0, 0.0, x)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) + eps * eps)
    return x * inverse, x > 0, inverse


@jit
def _heads_kernel(z, rate, q, k, v, decay, beta, H, z_stride, eps, K: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """A head of a row of `heads`."""
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, at = z + row * z_stride, row * H + head
    key, _, _ = _unit_key(z + head * K, i, i < K, eps)
    tl.store(q + at * K + i, key, mask=i < K)
    if rate is not None:
        key, _, _ = _unit_key(z + (H + head) * K, i, i < K, eps)
        tl.store(k + at * K + i, key, mask=i < K)
        z += 2 * H * K
        tl.store(v + at * D + j, _read(z + head * D, j, j < D), mask=j < D)
        z += H * D + head
        tl.store(beta + at, tl.sigmoid(tl.load(z).to(tl.float32)))
        tl.store(decay + at, tl.exp(-tl.load(rate + head) * _softplus(tl.load(z + H).to(tl.float32))))


@jit
def _heads_gradient_kernel(z, rate, grad_q, grad_k, grad_v, grad_beta, grad_log, out, grad_rate, H, z_stride, out_stride, eps,
                           K: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """A head of a row of `heads_gradient`."""
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, out, at, seen = z + row * z_stride, out + row * out_stride, row * H + head, i < K
    key, passed, inverse = _unit_key(z + head * K, i, seen, eps)
    g = _read(grad_q, at * K + i, seen)
    tl.store(out + head * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
    if rate is not None:
        key, passed, inverse = _unit_key(z + (H + head) * K, i, seen, eps)
        g = _read(grad_k, at * K + i, seen)
        tl.store(out + (H + head) * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
        tl.store(out + 2 * H * K + head * D + j, _read(grad_v, at * D + j, j < D), mask=j < D)
        scalar = 2 * H * K + H * D + head
        beta, log, a = tl.sigmoid(tl.load(z + scalar).to(tl.float32)), tl.load(grad_log + at), tl.load(z + scalar + H).to(tl.float32)
        tl.store(out + scalar, tl.load(grad_beta + at) * beta * (1 - beta))
        tl.store(out + scalar + H, -log * tl.load(rate + head) * tl.sigmoid(a))
        tl.store(grad_rate + at, -log * _softplus(a))


# ---- the gated delta rule: a memory of H heads that is written and read once a token ----
#
#     error = v - M^T k        M' = decay M + beta k error^T        read = M'^T q
#
# Columns of M (the values' dimensions) never meet, so a Triton program takes some of them and all rows, and a step is one pass over
# M. On CPU it is part of the C functions below, or PyTorch's operators.

def delta_step_reference(memory, k, v, decay, beta, q, keep=None):
    """`delta_step` as its definition; returns the new memory besides, and leaves the old as it was."""
    if keep is not None:
        memory = memory * keep[..., None, None]
    error = v - torch.einsum('bhkd,bhk->bhd', memory, k)
    memory = decay[..., None, None] * memory + beta[..., None, None] * torch.einsum('bhk,bhd->bhkd', k, error)
    return memory, torch.einsum('bhkd,bhk->bhd', memory, q)


def delta_step(memory, k, v, decay, beta, q, keep=None):
    """Writes to the memory, in place, and reads from it: the gated delta rule (GPN paper, eq. 10).

    memory (B, H, K, D); k, q (B, H, K); v (B, H, D); decay, beta (B, H); keep (B, 1), 0 in rows whose memory is emptied first.
    Returns what q reads (B, H, D).
    """
    if _gpn_kernels_serve(memory):
        read = torch.empty(v.shape, device=v.device, dtype=v.dtype)
        _delta_steps_in_triton(memory, memory, k, v, decay, beta, q, read, keep, 1)
        return read
    if keep is not None:
        memory.mul_(keep[..., None, None])
    _write(memory, k, v, decay, beta, memory)
    return rows_times(q, memory)


def rows_times(x, m):
    """x^T m of each head. x (B, H, n), m (B, H, n, p) -> (B, H, p). For m x give m transposed: CPUs are slow at the other way."""
    return torch.bmm(x.reshape(-1, 1, x.shape[-1]), m.flatten(0, 1)).view(*x.shape[:2], -1)


def _write(memory, k, v, decay, beta, out):
    error = v - rows_times(k, memory)
    torch.mul(memory, decay[..., None, None], out=out)
    out.addcmul_((k * beta.unsqueeze(-1)).unsqueeze(-1), error.unsqueeze(-2))


def delta_replay(memory, k, v, decay, beta, keep=None):
    """The memories before, between and after S steps: everything as in `delta_step` with an axis S in front of all but memory.

    Returns (S + 1, B, H, K, D), the first of them `memory`.
    """
    S = len(k)
    memories = memory.new_empty(S + 1, *memory.shape)
    memories[0] = memory
    if _gpn_kernels_serve(memory):
        _delta_steps_in_triton(memory, memories[1:], k, v, decay, beta, None, None, keep, S)
        return memories
    for t in range(S):
        before = memories[t] if keep is None else memories[t] * keep[t, :, :, None, None]
        _write(before, k[t], v[t], decay[t], beta[t], memories[t + 1])
    return memories


def delta_step_backward(grad, memory, k, v, decay, beta, q, grad_read, keep=None):
    """The gradient of `delta_step`. grad (B, H, K, D), of the memory after it, becomes that of the memory before it, in place.

    memory: before the step; grad_read (B, H, D): of what was read. Returns the gradients of q, k, v, beta and log(decay).
    """
    if _gpn_kernels_serve(memory):
        return _delta_backward_in_triton(grad, memory, k, v, decay, beta, q, grad_read, keep)
    if keep is not None:
        memory = memory * keep[..., None, None]
    grad.addcmul_(q.unsqueeze(-1), grad_read.unsqueeze(-2))
    error, b, memory_T = v - rows_times(k, memory), beta.unsqueeze(-1), memory.transpose(-1, -2)
    to_key, grad_v = rows_times(error, grad.transpose(-1, -2)), rows_times(k, grad) * b
    grad_beta = (k * to_key).sum(-1)
    # read = M'^T q with M' = decay M + beta k error^T
    grad_q = torch.addcmul(decay.unsqueeze(-1) * rows_times(grad_read, memory_T), b * k, (error * grad_read).sum(-1, keepdim=True))
    grad_k = torch.addcmul(rows_times(grad_v, memory_T), b, to_key, value=-1).neg_()
    grad_log = (grad * memory).sum((-1, -2)) * decay
    grad.mul_(decay[..., None, None]).addcmul_(k.unsqueeze(-1), grad_v.unsqueeze(-2), value=-1)
    if keep is not None:
        grad.mul_(keep[..., None, None])
    return grad_q, grad_k, grad_v, grad_beta, grad_log


@jit
def _delta_steps_kernel(memory, out, k, v, decay, beta, q, read, keep, S, BH, H, D, K: constexpr, ROWS: constexpr, N: constexpr):
    """S steps of N columns of one head. memory (BH, K, D); out (S, BH, K, D); k, q (S, BH, K); v, read (S, BH, D); decay, beta (S, BH)."""
    head, row, column = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.program_id(1) * N + tl.arange(0, N)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    m = tl.load(memory + head * K * D + place, mask=seen, other=0.0)
    for t in range(0, S):
        i = t * BH + head
        if keep is not None:
            m *= tl.load(keep + i // H)
        key = tl.load(k + i * K + row, mask=row < K, other=0.0)
        error = tl.load(v + i * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
        m = m * tl.load(decay + i) + (key * tl.load(beta + i))[:, None] * error[None, :]
        tl.store(out + i * K * D + place, m, mask=seen)
        if q is not None:
            ask = tl.load(q + i * K + row, mask=row < K, other=0.0)
            tl.store(read + i * D + column, tl.sum(m * ask[:, None], 0), mask=column < D)


@jit
def _delta_backward_kernel(grad, memory, k, v, decay, beta, q, grad_read, keep, rows, grad_v, scalars, BH, H, D,
                           K: constexpr, ROWS: constexpr, N: constexpr):
    """One step back, N columns of one head: their share of the gradients of q and k, rows (tiles, 2, BH, K), and of beta and
    log(decay), scalars (tiles, 2, BH); grad (BH, K, D) in place; grad_v (BH, D)."""
    head, tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS)
    column = tile * N + tl.arange(0, N)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = head * K * D + row[:, None] * D + column[None, :]
    kept = 1.0
    if keep is not None:
        kept = tl.load(keep + head // H)
    m = tl.load(memory + place, mask=seen, other=0.0) * kept
    key = tl.load(k + head * K + row, mask=row < K, other=0.0)
    ask = tl.load(q + head * K + row, mask=row < K, other=0.0)
    gr = tl.load(grad_read + head * D + column, mask=column < D, other=0.0)
    g = tl.load(grad + place, mask=seen, other=0.0) + ask[:, None] * gr[None, :]
    a, b = tl.load(decay + head), tl.load(beta + head)
    error = tl.load(v + head * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
    gv = tl.sum(g * key[:, None], 0) * b
    to_key = tl.sum(g * error[None, :], 1)
    gq = a * tl.sum(m * gr[None, :], 1) + b * key * tl.sum(error * gr, 0)
    gk = b * to_key - tl.sum(m * gv[None, :], 1)
    tl.store(rows + (tile * 2 * BH + head) * K + row, gq, mask=row < K)
    tl.store(rows + (tile * 2 * BH + BH + head) * K + row, gk, mask=row < K)
    tl.store(scalars + tile * 2 * BH + head, tl.sum(key * to_key, 0))
    tl.store(scalars + tile * 2 * BH + BH + head, a * tl.sum(tl.sum(g * m, 1), 0))
    tl.store(grad_v + head * D + column, gv, mask=column < D)
    tl.store(grad + place, kept * (a * g - key[:, None] * gv[None, :]), mask=seen)


DELTA_COLUMNS, DELTA_WARPS = 32, 4  # of a program


def _delta_steps_in_triton(memory, out, k, v, decay, beta, q, read, keep, S):
    B, H, K, D = memory.shape
    grid = B * H, triton.cdiv(D, DELTA_COLUMNS)
    k, v, decay, beta, q, keep = (x if x is None else x.contiguous() for x in (k, v, decay, beta, q, keep))
    with torch.cuda.device_of(memory):
        _delta_steps_kernel[grid](memory, out, k, v, decay, beta, q, read, keep, S, B * H, H, D, K, triton.next_power_of_2(K), DELTA_COLUMNS,
                                  num_warps=DELTA_WARPS, num_stages=1)


def _delta_backward_in_triton(grad, memory, k, v, decay, beta, q, grad_read, keep):
    B, H, K, D = memory.shape
    tiles = triton.cdiv(D, DELTA_COLUMNS)
    rows, scalars = memory.new_empty(tiles, 2, B, H, K), memory.new_empty(tiles, 2, B, H)
    grad_v = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    tensors = (x if x is None else x.contiguous() for x in (k, v, decay, beta, q, grad_read, keep))
    with torch.cuda.device_of(memory):
        _delta_backward_kernel[B * H, tiles](grad, memory, *tensors, rows, grad_v, scalars, B * H, H, D, K, triton.next_power_of_2(K),
                                             DELTA_COLUMNS, num_warps=DELTA_WARPS, num_stages=1)
    (grad_q, grad_k), (grad_beta, grad_log) = rows.sum(0), scalars.sum(0)
    return grad_q, grad_k, grad_v, grad_beta, grad_log


# ---- GPN's steps on CPU ----
#
# A step is three products of few rows and many small operators. In PyTorch launching those takes longer than the products, and the
# products take almost three times as long as here (8 rows, two AVX-512 cores). In C a segment of steps is one call.

GPN_C = r"""
#include <stdlib.h>
#include <tgmath.h>

#ifdef DOUBLE
typedef double real;
typedef long whole;
enum { LARGEST = 708, TERMS = 13, BIAS = 1023, MANTISSA = 52 };
#else
typedef float real;
typedef int whole;
enum { LARGEST = 87, TERMS = 7, BIAS = 127, MANTISSA = 23 };
#endif

#ifdef __AVX512F__
enum { BYTES = 64, ROWS = 8 };  /* of a vector; of a tile, which with two vectors a row stays in registers */
#elif defined __AVX__
enum { BYTES = 32, ROWS = 4 };
#else
enum { BYTES = 16, ROWS = 4 };
#endif
enum { LANES = BYTES / sizeof(real), PANEL = 2 * LANES, WORTH_THREADS = 1 << 18 /* multiplications of a product */ };
typedef real vector __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef struct { long S, B, C, F, H, K, D, L; real state_eps, answer_eps, key_eps; } sizes;

#define EACH(i, n) _Pragma("GCC ivdep") for (long i = 0; i < (n); i++)  /* where two arrays may be one, only equal places meet */
#define SHARED(i, n) _Pragma("omp for") for (long i = 0; i < (n); i++)  /* by all threads, which then wait for each other */
#define INLINE static inline __attribute__((always_inline))

const int panel = PANEL;

/* ---- y (B, n) = x (B, c) W^T + bias; W in panels (ceil(n / PANEL), c, PANEL) ---- */

INLINE void tile(const int R, const real *x, const real *w, const real *bias, real *y, long c, long n, long columns) {
    vector sum[ROWS][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = (vector){0};
    for (long i = 0; i < c; i++) {
        vector left = *(vector *)(w + i * PANEL), right = *(vector *)(w + i * PANEL + LANES);
        for (int r = 0; r < R; r++) sum[r][0] += x[r * c + i] * left, sum[r][1] += x[r * c + i] * right;
    }
    for (int r = 0; r < R; r++)
        EACH(j, columns) y[r * n + j] = ((real *)sum[r])[j] + (bias ? bias[j] : 0);
}

static void product(const real *x, const real *w, const real *bias, real *y, long B, long c, long n) {
    SHARED(p, (n + PANEL - 1) / PANEL) {
        long j = p * PANEL, b = 0, columns = n - j < PANEL ? n - j : PANEL;
        const real *some = bias ? bias + j : 0;
        for (; b + ROWS <= B; b += ROWS) tile(ROWS, x + b * c, w + j * c, some, y + b * n + j, c, n, columns);
        for (; b < B; b++) tile(1, x + b * c, w + j * c, some, y + b * n + j, c, n, columns);
    }
}

/* ---- pieces of a step ---- */

INLINE real exponential(real x) {  /* exp(x) in operations that a compiler makes vectors of: 2^n exp(r), |r| < 0.35, by its series */
    x = x < -LARGEST ? -LARGEST : x > LARGEST ? LARGEST : x;
    real n = rint(x * (real)1.4426950408889634), r = x - n * (real)0.6931471805599453, sum = 1;
    for (int i = TERMS; i > 0; i--) sum = 1 + sum * r * (1 / (real)i);
    union { whole bits; real number; } scale = {((whole)n + BIAS) << MANTISSA};
    return sum * scale.number;
}
INLINE real sigmoid(real x) { return 1 / (1 + exponential(-x)); }
INLINE real softplus(real x) { return x > 20 ? x : log1p(exp(x)); }

INLINE real unit(const real *x, real *y, long n, real eps) {  /* y = x / sqrt(|x|^2 + eps^2); returns 1 / the root */
    real sum = eps * eps;
    EACH(i, n) sum += x[i] * x[i];
    real inverse = 1 / sqrt(sum);
    EACH(i, n) y[i] = x[i] * inverse;
    return inverse;
}

INLINE void unit_gradient(const real *grad, const real *y, real inverse, real *out, long n) {
    real along = 0;
    EACH(i, n) along += grad[i] * y[i];
    EACH(i, n) out[i] = (grad[i] - along * y[i]) * inverse;
}

INLINE real key(const real *z, real *k, long K, real eps) {  /* eq. 8 */
    EACH(i, K) k[i] = z[i] < 0 ? 0 : z[i];
    return unit(k, k, K, eps);
}

INLINE void key_gradient(const real *grad, const real *k, real inverse, real *out, long K) {
    unit_gradient(grad, k, inverse, out, K);
    EACH(i, K) out[i] = k[i] > 0 ? out[i] : 0;
}

INLINE void write(const real *before, real *after, const real *k, const real *v, real decay, real beta, real kept, long K, long D) {  /* eq. 10 */
    real error[D];
    EACH(d, D) error[d] = v[d];
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= kept * k[a] * before[a * D + d];
    for (long a = 0; a < K; a++)
        EACH(d, D) after[a * D + d] = kept * decay * before[a * D + d] + beta * k[a] * error[d];
}

INLINE void read_gradient(real *g, const real *m, const real *q, const real *grad, real *gq, long K, long D) {
    for (long a = 0; a < K; a++) {
        real sum = 0;
        EACH(d, D) g[a * D + d] += q[a] * grad[d], sum += m[a * D + d] * grad[d];
        gq[a] = sum;
    }
}

/* g: of the memory after it, then of the one before; returns the gradient of beta, in *glog that of log(decay) */
INLINE real write_gradient(real *g, const real *before, const real *k, const real *v, real decay, real beta, real kept, real *gk, real *gv,
                           real *glog, long K, long D) {
    real error[D], gbeta = 0, held = 0;
    EACH(d, D) error[d] = v[d], gv[d] = 0;
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= kept * k[a] * before[a * D + d], gv[d] += beta * k[a] * g[a * D + d];
    for (long a = 0; a < K; a++) {
        real to_key = 0, through = 0, along = 0;
        EACH(d, D) {
            real m = kept * before[a * D + d], x = g[a * D + d];
            to_key += x * error[d], through += m * gv[d], along += m * x;
            g[a * D + d] = kept * (decay * x - k[a] * gv[d]);
        }
        gk[a] = beta * to_key - through, gbeta += k[a] * to_key, held += along;
    }
    *glog = decay * held;
    return gbeta;
}

INLINE real goes_on(const real *keep, long row) { return keep ? keep[row] : 1; }  /* 0 where a document starts */

/* Columns of a layer's product in: gate C | query HK | if it writes: key HK, value HD, beta H, decay H | silu'd F + HD | up F. */
INLINE long values(const sizes *n) { return n->C + 2 * n->H * n->K; }
INLINE long width(const sizes *n, long l) {
    return n->C + 2 * n->F + n->H * (n->K + n->D) + (l ? 0 : n->H * (n->K + n->D + 2));
}

/* ---- S steps ----
   w: of the ground's gate weight and bias, of each layer the weight and bias of its product in, the weight of its product out; then the
   decay rates and the first key. s (B, C), k (B, H, K), memory (B, H, K, D) in place. keep (S, B), 0 where a document starts; active (S, B),
   0 in rows that stay as they are; or null. kept (S, B, ...): states of the layers, the ground's product, of each layer the product in
   and, with a memory, the answer. */

void steps(const sizes *n, real *const *w, real *s, real *k, real *memory, const real *u, const real *keep, const char *active,
           real *const *kept) {
    const long B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L, Y = F + H * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    real *room = malloc(sizeof(real) * B * (3 * C + Y)), *ground = room, *normed = ground + B * C, *sum = normed + B * C, *y = sum + B * C;
#pragma omp parallel if (B * C * width(n, 0) > WORTH_THREADS)
    for (long t = 0; t < n->S; t++) {
        const real *x = ground;
        real *z0 = kept[L] + t * B * C;
        SHARED(b, B) {
            if (!goes_on(keep, t * B + b) && (!active || active[t * B + b])) {
                EACH(i, C) s[b * C + i] = 0;
                EACH(i, H * K) k[b * H * K + i] = first_key[i];
            }
            unit(s + b * C, normed + b * C, C, n->state_eps);
        }
        product(normed, w[0], w[1], z0, B, C, C);
        SHARED(b, B) {
            EACH(i, C) ground[b * C + i] = u[(t * B + b) * C + i] + sigmoid(z0[b * C + i]) * s[b * C + i];  /* eq. 4 */
            unit(ground + b * C, normed + b * C, C, n->state_eps);
        }
        for (long l = 0; l < L; l++) {
            const long W = width(n, l);
            real *z = kept[L + 1 + l * (H ? 2 : 1)] + t * B * W, *answer = H ? kept[L + 2 + 2 * l] + t * B * H * D : 0;
            real *next = kept[l] + t * B * C;
            product(normed, w[2 + 3 * l], w[3 + 3 * l], z, B, C, W);
            SHARED(j, B * H) {
                const long b = j / H, h = j % H;
                const real *zq = z + b * W + C + h * K, *zv = z + b * W + values(n) + h * D, *zb = z + b * W + values(n) + H * D + h;
                real *m = memory + j * K * D, *read = answer + j * D, q[K];
                if (l == 0 && (!active || active[t * B + b])) {
                    write(m, m, k + j * K, zv, exponential(-rate[h] * softplus(zb[H])), sigmoid(*zb), goes_on(keep, t * B + b), K, D);
                    key(zq + H * K, k + j * K, K, n->key_eps);
                }
                key(zq, q, K, n->key_eps);
                EACH(d, D) read[d] = 0;
                for (long a = 0; a < K; a++)
                    EACH(d, D) read[d] += q[a] * m[a * D + d];
            }
            SHARED(b, B) {
                const real *silu = z + b * W + W - F - Y, *up = silu + Y;
                real *out = y + b * Y;
                unit(answer + b * H * D, out + F, H * D, n->answer_eps);
                EACH(i, F) out[i] = silu[i] * sigmoid(silu[i]) * up[i];
                EACH(i, H * D) out[F + i] *= silu[F + i] * sigmoid(silu[F + i]);
            }
            product(y, w[4 + 3 * l], 0, sum, B, Y, C);
            SHARED(b, B) {
                EACH(i, C) next[b * C + i] = sum[b * C + i] + sigmoid(z[b * W + i]) * x[b * C + i];  /* eq. 7, 11 */
                unit(next + b * C, normed + b * C, C, n->state_eps);
                if (l == L - 1 && (!active || active[t * B + b]))
                    EACH(i, C) s[b * C + i] = next[b * C + i];
            }
            x = next;
        }
    }
    free(room);
}

/* ---- and their gradient ----
   As `segment_gradient` of model_gpn.py, which names the arguments; weights transposed, ds, dk, dm in place. memories (S, B, H, K, D) is
   room for the memory after each step; drate (B, H) and dfirst (B, H, K) start as zeros. pairs (S, B, ...): of the ground's product, then
   of each layer's products in and out, the gradient of the result and what was multiplied. */

void gradient(const sizes *n, real *const *w, long cut_end, const real *u, const real *keep, const real *s, const real *k, const real *memory,
              const real *grad, real *ds, real *dk, real *dm, real *const *kept, real *memories, real *du, real *drate, real *dfirst,
              real *const *pairs) {
    const long S = n->S, B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L, Y = F + H * D, M = B * H * K * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    real *room = malloc(sizeof(real) * B * (3 * C + width(n, 0) + Y + H * D + 1 + S * H * K)), *state = room, *ground = state + B * C;
    real *back = ground + B * C, *cut = back + B * C, *dy = cut + B * width(n, 0), *danswer = dy + B * Y, *inverse = danswer + B * H * D;
    real *keys = inverse + B;  /* that each step writes under */
#pragma omp parallel if (B * C * width(n, 0) > WORTH_THREADS)
    {
        SHARED(j, B * H)
            for (long t = 0; t < S; t++) {
                const long b = j / H, h = j % H;
                const real on = goes_on(keep, t * B + b), *z = kept[L + 1] + (t * B + b) * width(n, 0), *zb = z + values(n) + H * D + h;
                real *used = keys + (t * B * H + j) * K;
                if (!on) EACH(i, K) used[i] = first_key[h * K + i];
                else if (t == 0) EACH(i, K) used[i] = k[j * K + i];
                else key(z - B * width(n, 0) + C + (H + h) * K, used, K, n->key_eps);
                write((t ? memories + (t - 1) * M : memory) + j * K * D, memories + t * M + j * K * D, used, z + values(n) + h * D,
                      exponential(-rate[h] * softplus(zb[H])), sigmoid(*zb), on, K, D);
            }
        for (long t = S - 1; t >= 0; t--) {
            const real *z0 = kept[L] + t * B * C;
            real *dz0 = pairs[0] + t * B * C, *n0 = pairs[1] + t * B * C, *dground = du + t * B * C;
            SHARED(b, B) {
                const long row = b * C, at = t * B * C + row;
                const real on = goes_on(keep, t * B + b);
                EACH(i, C) {
                    state[row + i] = on * s[at + i];
                    ground[row + i] = u[at + i] + sigmoid(z0[row + i]) * state[row + i];
                    pairs[4 * L][at + i] = ds[row + i] + grad[at + i];
                }
            }
            for (long l = L - 1; l >= 0; l--) {
                const long W = width(n, l), ends = cut_end && t == S - 1 && l == 0;
                const real *z = kept[L + 1 + l * (H ? 2 : 1)] + t * B * W, *answer = H ? kept[L + 2 + 2 * l] + t * B * H * D : 0;
                const real *x = l ? kept[l - 1] + t * B * C : ground, *d = pairs[4 + 4 * l] + t * B * C;
                real *dz = pairs[2 + 4 * l] + t * B * W, *normed = pairs[3 + 4 * l] + t * B * C, *y = pairs[5 + 4 * l] + t * B * Y;
                real *dx = l ? pairs[4 * l] + t * B * C : dground;
                product(d, w[4 + 3 * l], 0, dy, B, C, Y);
                SHARED(b, B) {
                    const long silu = b * W + W - F - Y, up = silu + Y;
                    real other[Y], dother[Y], length = unit(answer + b * H * D, other + F, H * D, n->answer_eps);
                    EACH(i, F) other[i] = z[up + i];
                    EACH(i, Y) {
                        real half = sigmoid(z[silu + i]), whole = z[silu + i] * half;
                        y[b * Y + i] = whole * other[i];
                        dz[silu + i] = dy[b * Y + i] * other[i] * half * (1 + z[silu + i] - whole);
                        dother[i] = dy[b * Y + i] * whole;
                    }
                    EACH(i, F) dz[up + i] = dother[i];
                    unit_gradient(dother + F, other + F, length, danswer + b * H * D, H * D);
                    EACH(i, C) {
                        real gate = sigmoid(z[b * W + i]);
                        dz[b * W + i] = d[b * C + i] * x[b * C + i] * gate * (1 - gate);
                    }
                    inverse[b] = unit(x + b * C, normed + b * C, C, n->state_eps);
                }
                SHARED(j, B * H) {
                    const long b = j / H, h = j % H, query = b * W + C + h * K, value = b * W + values(n) + h * D;
                    const long write_gate = b * W + values(n) + H * D + h, decay_gate = write_gate + H;
                    real *g = dm + j * K * D, unit_key[K], dkey[K], length = key(z + query, unit_key, K, n->key_eps);
                    read_gradient(g, memories + t * M + j * K * D, unit_key, danswer + j * D, dkey, K, D);
                    key_gradient(dkey, unit_key, length, dz + query, K);
                    if (l == 0) {
                        const real on = goes_on(keep, t * B + b), beta = sigmoid(z[write_gate]), soft = softplus(z[decay_gate]);
                        real dlog;
                        length = key(z + query + H * K, unit_key, K, n->key_eps);
                        key_gradient(dk + j * K, unit_key, length, dz + query + H * K, K);
                        dz[write_gate] = beta * (1 - beta) * write_gradient(
                            g, (t ? memories + (t - 1) * M : memory) + j * K * D, keys + (t * B * H + j) * K, z + value,
                            exponential(-rate[h] * soft), beta, on, dk + j * K, dz + value, &dlog, K, D);
                        dz[decay_gate] = -rate[h] * sigmoid(z[decay_gate]) * dlog;
                        drate[j] -= soft * dlog;
                        if (!on) EACH(i, K) dfirst[j * K + i] += dk[j * K + i], dk[j * K + i] = 0;
                    }
                }
                if (ends)  /* the key's gradient reaches its weights, and no further */
                    SHARED(b, B) {
                        EACH(i, W) cut[b * W + i] = dz[b * W + i];
                        EACH(i, H * K) cut[b * W + C + H * K + i] = 0;
                    }
                product(ends ? cut : dz, w[2 + 3 * l], 0, back, B, W, C);
                SHARED(b, B) {
                    unit_gradient(back + b * C, normed + b * C, inverse[b], dx + b * C, C);
                    EACH(i, C) dx[b * C + i] += d[b * C + i] * sigmoid(z[b * W + i]);
                }
            }
            SHARED(b, B) EACH(i, C) {
                const long at = b * C + i;
                const real gate = sigmoid(z0[at]);
                dz0[at] = dground[at] * state[at] * gate * (1 - gate);
            }
            product(dz0, w[0], 0, back, B, C, C);
            SHARED(b, B) {
                const long row = b * C;
                const real on = goes_on(keep, t * B + b), length = unit(state + row, n0 + row, C, n->state_eps);
                unit_gradient(back + row, n0 + row, length, ds + row, C);
                EACH(i, C) ds[row + i] = on * (ds[row + i] + dground[row + i] * sigmoid(z0[row + i]));
            }
        }
    }
    free(room);
}
"""


@functools.cache
def _build_gpn(dtype):
    """GPN_C for this machine and dtype, built in a second or two; None where that fails, as without a C compiler."""
    compiler = shutil.which(os.environ.get('CC', 'cc'))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, 'gpn.c'), os.path.join(folder, 'gpn.so')
        with open(source, 'w') as file:
            file.write(GPN_C)
        flags = '-O3 -march=native -fno-math-errno -fno-signed-zeros -fno-trapping-math -fassociative-math -shared -fPIC'
        flags += ' -DDOUBLE' if dtype == torch.float64 else ''
        build = lambda *more: subprocess.run([compiler, *flags.split(), *more, source, '-o', library, '-lm'], capture_output=True).returncode == 0
        if not (build('-fopenmp') or build()):  # gcc's threads are PyTorch's: the library is loaded already
            return None
        try:
            library = ctypes.CDLL(library)
        except OSError:  # a folder for data only
            return None
    number = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    fields = [(name, ctypes.c_long) for name in 'SBCFHKDL'] + [(name, number) for name in ('state_eps', 'answer_eps', 'key_eps')]
    library.sizes = type('sizes', (ctypes.Structure,), {'_fields_': fields})
    return library


class GPNInC:
    """`steps` and `segment_gradient` of model_gpn.py for weights in fp32 or float64 on CPU."""

    @staticmethod
    def serves(device, dtype):
        wanted = COMPILE and not REFERENCE and not KERNELS_ON_CPU and device.type == 'cpu' and dtype in (torch.float32, torch.float64)
        return wanted and _build_gpn(dtype) is not None

    def __init__(self, products, rate, first_key, sizes, eps):
        """products: the ground gate's (weight, bias), of each layer the (weight, bias) in and the weight out; sizes: model_gpn's;
        eps: of the state's unit length, of the answer's, of the keys'."""
        self.library, self.sizes, self.dtype = _build_gpn(rate.dtype), sizes, rate.dtype
        self.numbers = self.library.sizes(0, 0, *sizes, *eps)
        self.weights = [w if w is None or w.dim() == 1 else self._panels(w) for w in products] + [rate, first_key]
        self.pointers = self._pointers(self.weights)

    def _panels(self, weight):
        """(n, c) -> (ceil(n / width), c, width), so that a tile reads its weights in a row."""
        width = ctypes.c_int.in_dll(self.library, 'panel').value
        return F.pad(weight, (0, 0, 0, -len(weight) % width)).unflatten(0, (-1, width)).transpose(1, 2).contiguous()

    @staticmethod
    def _pointers(tensors):
        return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))

    def _convert(self, x):
        """An argument of a C function: a list of tensors or None, one of them, or a number."""
        if isinstance(x, list):
            return self._pointers(x)
        return ctypes.c_long(x) if isinstance(x, int) else ctypes.c_void_p(None if x is None else x.data_ptr())

    def _call(self, function, u, *arguments):
        assert u.dtype == self.dtype, f'{u.dtype} with weights of {self.dtype}'
        self.numbers.S, self.numbers.B = u.shape[:2]
        function(ctypes.byref(self.numbers), self.pointers, *map(self._convert, arguments))

    def steps(self, s, k, memory, u, keep=None, active=None):
        s, k, u, keep, active = (x if x is None else x.contiguous() for x in (s.clone(), k.clone(), u, keep, active))
        rows = [torch.empty_like(u) for _ in range(self.sizes.n_layer)] + [u.new_empty(*u.shape[:2], width) for width in self.sizes.kept()]
        self._call(self.library.steps, u, s, k, memory, u, keep, active, rows)
        return s, k, memory, rows

    def gradient(self, cut_end, u, keep, s, k, memory, grad, ds, dk, dm, *kept):
        (S, B, _), c = u.shape, self.sizes
        du, ds, dk, dm = torch.empty_like(u), ds.clone(), dk.clone(), dm.clone()
        kept = [x.contiguous() for x in (*kept[:c.n_layer - 1], u, *kept[c.n_layer - 1:])]  # the last states are not read
        drate, dfirst, memories = u.new_zeros(B, c.n_head), torch.zeros_like(dk), u.new_empty(S, *memory.shape)
        widths = [c.n_embd, c.n_embd]
        for i in range(c.n_layer):
            widths += [sum(c.columns(i)), c.n_embd, c.n_embd, c.n_ffn + c.n_head * c.d_v]
        pairs = [u.new_empty(S, B, width) for width in widths]
        inputs = [x if x is None else x.contiguous() for x in (u, keep, s, k, memory, grad)]
        self._call(self.library.gradient, u, int(cut_end), *inputs, ds, dk, dm, kept, memories, du, drate, dfirst, pairs)
        return du, ds, dk, dm, drate.sum(0), dfirst.sum(0), list(zip(pairs[::2], pairs[1::2]))
