"""Triton kernels for the attention of model_standard.py and model_sps.py, unless it was edited.

They implement the patterns of PINS. A query sees one contiguous range of each stream's keys:

    max(doc_start, q.pos - reach) <= k.pos <= q.pos - strict    strict: 1 for x seeing rho, else 0

A program computes one tile of queries, positions i..j of one stream and head. It loops over tiles
of keys, from the first key of i to the last of j. All queries see the keys between the first of j
and the last of i, so tiles there need no mask:

    first of i [left: masked] first of j [full tiles] last of i [right: masked] last of j

For dk and dv the roles are swapped: a program owns a tile of keys and loops over queries. No two
programs add to the same element, so results are deterministic.

q, out: (B, NQ * T, H, D); k, v: (B, NK * T, HK, D), contiguous. lse, delta: (B, H, NQ * T), fp32.
NQ, NK: number of streams. FIRST: first query stream. GROUP: query heads per key head.
"""
import functools

import torch

from . import constexpr, digest, jit, kernels_on_cpu, tl, triton, warn_once

PINS = {  # digest of `sees`: what it reads of its model, the reach of each stream of keys
    'f3133ca0f9eace0d': ('reach',),  # model_standard.py
    '40b5558e8197241b': ('w_x', 'w_rho'),  # model_sps.py
}
TILES = {  # (head size, bits): {result: (queries, keys, warps, stages) of a tile}; no spills on an H100
    (32, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 3), 'dk, dv': (64, 128, 8, 2)},
    (64, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 3), 'dk, dv': (64, 128, 8, 2)},
    (128, 16): {'out': (128, 64, 8, 3), 'dq': (128, 64, 8, 2), 'dk, dv': (32, 128, 8, 2)},
    (32, 32): {'out': (64, 32, 8, 2), 'dq': (64, 32, 8, 2), 'dk, dv': (32, 32, 8, 1)},
    (64, 32): {'out': (32, 32, 8, 2), 'dq': (32, 32, 8, 2), 'dk, dv': (32, 32, 8, 1)},
    (128, 32): {'out': (32, 16, 8, 1), 'dq': (16, 16, 8, 1), 'dk, dv': (16, 16, 8, 1)},
}
LOG2_E = constexpr(1.4426950408889634)  # e^x = 2^(x LOG2_E): kernels have exp2


def make_mask(model, T, device, doc_start=None, keys=(0,), queries=None):
    """Return a mask for `attention`, a function (q, k, v) -> out. None: attn_kernels makes one.

    The arguments are those of attn_kernels.make_mask. With attention = 'triton', raises ValueError
    if the kernels cannot run.
    """
    D, reaches, queries = model.config.head_size, reaches_of(model), queries or keys
    if model.config.attention == 'auto':
        if not is_chosen(model, T, doc_start, keys, queries, torch.cuda.get_device_properties(device)):
            return None
    elif (D, 16) not in TILES:
        raise ValueError(f'Triton kernels support head sizes 32, 64 and 128, not {D}: use --attention=auto')
    elif reaches is None:
        raise ValueError(f'the attention of {_name(model)} has been edited, and the Triton kernels do not implement '
                         'the edit: use --attention=auto')
    elif triton is None or device.type == 'cpu' and not kernels_on_cpu():
        raise ValueError('attention = triton needs a GPU and the package triton: use --attention=auto')
    return functools.partial(triton_attention, doc_start=doc_start, reaches=reaches[:len(keys)], T=T, first=queries[0])


def is_chosen(model, T, doc_start, keys, queries, gpu):
    """Return True if attention = 'auto' takes the kernels. gpu: properties of the device."""
    D, reaches = model.config.head_size, reaches_of(model)
    is_causal = doc_start is None and keys == queries == (0,) and (reaches is None or reaches[0] >= T - 1)
    if triton is None or is_causal or (D, 8 * model.embed.weight.itemsize) not in TILES:  # cuDNN: faster if causal
        return False
    rows, columns, _, stages = TILES[D, 16]['dq']  # most shared memory, even for fp32: q, grad; k, v per stage
    fits = 2 * (rows + stages * columns) * D * 2 <= gpu.shared_memory_per_block_optin
    if fits and reaches is None:
        warn_once(f'the attention of {_name(model)} was edited, so FlexAttention runs it, without scans/attention.py')
    return fits and reaches is not None


def reaches_of(model):
    """Return how many past positions a query sees of each stream. None for anything else."""
    try:
        names = PINS[digest(model.sees.__func__)]
    except Exception:  # `sees` has another text, no source file, or is a list
        return None
    reaches = [getattr(model.sees.__self__, name) for name in names]
    return None if hasattr(model, 'score_bias') or any(not isinstance(x, int) for x in reaches) else reaches


def _name(model):
    return type(model.config).__module__.rpartition('.')[2]  # FSDP changes the class of the model


@jit
def _sees(q_pos, doc_start, k_pos, strict, reach):
    """Return the pattern (SPS paper, eq. 5), elementwise."""
    return (k_pos <= q_pos - strict) & (k_pos >= tl.maximum(doc_start, q_pos - reach))


@jit
def _walk(lo, full_lo, full_hi, hi, BLOCK: constexpr):
    """Return lo and counts of tiles over lo..hi: left, full (in full_lo..full_hi), right."""
    left = tl.cdiv(tl.maximum(tl.minimum(full_lo, hi) - lo, 0), BLOCK)
    full = tl.maximum(full_hi - lo - left * BLOCK, 0) // BLOCK  # 0 if none is seen by all (full_lo > full_hi)
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
    """Return where a walk's i-th tile starts, of the full ones or of the masked, left first."""
    lo, left, full, _ = walk
    return lo + (i + (left if FULL else tl.where(i < left, 0, full))) * BLOCK


@jit
def _head(b, stream, h, n_streams, T, H, D):
    """Return the offset of a head's position 0 in (B, n_streams * T, H, D). b is 64-bit."""
    return ((b * n_streams + stream) * T * H + h) * D


@jit
def _pointers(x, first, H, D: constexpr, BLOCK: constexpr):
    """Return pointers (BLOCK, D) to positions first..first + BLOCK of the head at x."""
    return x + tl.cast(first, tl.int64) * H * D + tl.arange(0, BLOCK)[:, None] * H * D + tl.arange(0, D)[None, :]


@jit
def _load(x, first, T, H, D: constexpr, BLOCK: constexpr, FULL: constexpr):
    """Load (BLOCK, D) at positions first..first + BLOCK; unless FULL, zeros from position T on."""
    if FULL:
        return tl.load(_pointers(x, first, H, D, BLOCK))
    return tl.load(_pointers(x, first, H, D, BLOCK), mask=(first + tl.arange(0, BLOCK) < T)[:, None], other=0.0)


@jit
def _load_scalars(x, pos, T, other, FULL: constexpr):
    """Load one value per position; unless FULL, `other` from position T on."""
    return tl.load(x + pos) if FULL else tl.load(x + pos, mask=pos < T, other=other)


@jit
def _store(x, first, T, H, tile, D: constexpr, BLOCK: constexpr):
    pointers = _pointers(x, first, H, D, BLOCK)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(first + tl.arange(0, BLOCK) < T)[:, None])


@jit
def _query_tile(T, H, NQ: constexpr, BLOCK: constexpr):
    """Return this program's batch row, head, stream index, first and last query position."""
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # start with the last positions: they see the most keys
    first = tile // NQ * BLOCK
    return b, h, tile % NQ, first, tl.minimum(first + BLOCK, T) - 1


@jit
def _scores(q_tile, k_tile, q_pos, q_doc_start, k_first, strict, reach, BLOCK_K: constexpr, FULL: constexpr):
    """Return unscaled scores (queries, keys), -inf where the query does not see the key."""
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision='ieee')
    if not FULL:
        k_pos = k_first + tl.arange(0, BLOCK_K)
        seen = _sees(q_pos[:, None], q_doc_start[:, None], k_pos[None, :], strict, reach)
        s = tl.where(seen, s, float('-inf'))
    return s


@jit
def _forward_kernel(q, k, v, doc_start, out, lse, reach_x, reach_rho, T, H, scale, GROUP: constexpr, NQ: constexpr,
                    NK: constexpr, FIRST: constexpr, D: constexpr, BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute out, and lse: the log-sum-exp of each query's scores, in base 2."""
    b, h, q_stream, first, last = _query_tile(T, H, NQ, BLOCK_Q)
    HK, doc_start, scale = H // GROUP, doc_start + b * T, scale * LOG2_E  # softmax in base 2
    q_pos = first + tl.arange(0, BLOCK_Q)
    q_doc_start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
    head = _head(b, q_stream, h, NQ, T, H, D)
    q_tile = _load(q + head, first, T, H, D, BLOCK_Q, False)

    m = tl.full((BLOCK_Q,), -1e30, tl.float32)  # running maximum; finite because a query may see no key of a tile
    l = tl.zeros((BLOCK_Q,), tl.float32)  # running sum
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for k_stream in tl.static_range(NK):
        reach = reach_x if k_stream == 0 else reach_rho
        strict = tl.where(k_stream > FIRST + q_stream, 1, 0)
        k_head = _head(b, k_stream, h // GROUP, NK, T, HK, D)
        walk = _walk_keys(first, last, doc_start, strict, reach, BLOCK_K)
        for FULL in tl.static_range(2):  # 0: masked tiles, left and right; 1: full tiles
            for i in range(_tile_count(walk, FULL)):
                k_first = _tile_start(walk, i, FULL, BLOCK_K)
                k_tile = _load(k + k_head, k_first, T, HK, D, BLOCK_K, FULL)
                v_tile = _load(v + k_head, k_first, T, HK, D, BLOCK_K, FULL)
                s = _scores(q_tile, k_tile, q_pos, q_doc_start, k_first, strict, reach, BLOCK_K, FULL)
                m_new = tl.maximum(m, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - m_new[:, None])
                shrink = tl.exp2(m - m_new)
                m, l = m_new, l * shrink + tl.sum(p, 1)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision='ieee')
    l = tl.where(q_pos < T, l, 1.0)
    _store(out + head, first, T, H, acc / l[:, None], D, BLOCK_Q)
    tl.store(lse + ((b * H + h) * NQ + q_stream) * T + q_pos, m + tl.log2(l), mask=q_pos < T)


@jit
def _query_gradient_kernel(q, k, v, doc_start, out, lse, grad, delta, dq, reach_x, reach_rho, T, H, scale,
                           GROUP: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr,
                           BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute dq, and delta = (out * grad).sum(-1) for `_key_gradient_kernel`."""
    b, h, q_stream, first, last = _query_tile(T, H, NQ, BLOCK_Q)
    HK, doc_start = H // GROUP, doc_start + b * T
    q_pos = first + tl.arange(0, BLOCK_Q)
    q_doc_start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
    head = _head(b, q_stream, h, NQ, T, H, D)
    q_tile = _load(q + head, first, T, H, D, BLOCK_Q, False)
    out_tile = _load(out + head, first, T, H, D, BLOCK_Q, False)
    grad_tile = _load(grad + head, first, T, H, D, BLOCK_Q, False)
    row = ((b * H + h) * NQ + q_stream) * T
    q_lse = _load_scalars(lse + row, q_pos, T, float('inf'), False)  # inf: p is 0 there
    q_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta + row + q_pos, q_delta, mask=q_pos < T)

    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    for k_stream in tl.static_range(NK):
        reach = reach_x if k_stream == 0 else reach_rho
        strict = tl.where(k_stream > FIRST + q_stream, 1, 0)
        k_head = _head(b, k_stream, h // GROUP, NK, T, HK, D)
        walk = _walk_keys(first, last, doc_start, strict, reach, BLOCK_K)
        for FULL in tl.static_range(2):
            for i in range(_tile_count(walk, FULL)):
                k_first = _tile_start(walk, i, FULL, BLOCK_K)
                k_tile = _load(k + k_head, k_first, T, HK, D, BLOCK_K, FULL)
                v_tile = _load(v + k_head, k_first, T, HK, D, BLOCK_K, FULL)
                s = _scores(q_tile, k_tile, q_pos, q_doc_start, k_first, strict, reach, BLOCK_K, FULL)
                p = tl.exp2(s * (scale * LOG2_E) - q_lse[:, None])
                dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision='ieee')
                ds = p * (dp - q_delta[:, None])
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision='ieee')
    _store(dq + head, first, T, H, acc * scale, D, BLOCK_Q)


@jit
def _key_gradient_kernel(q, k, v, doc_start, doc_end, lse, grad, delta, dk, dv, reach_x, reach_rho, T, H, scale,
                         GROUP: constexpr, NQ: constexpr, NK: constexpr, FIRST: constexpr, D: constexpr,
                         BLOCK_Q: constexpr, BLOCK_K: constexpr):
    """Compute dk and dv of a tile of keys, summed over its query heads and query streams."""
    HK = H // GROUP
    b, h = (tl.program_id(1) // HK).to(tl.int64), tl.program_id(1) % HK
    k_stream, first = tl.program_id(0) % NK, tl.program_id(0) // NK * BLOCK_K
    last = tl.minimum(first + BLOCK_K, T) - 1
    doc_start, doc_end = doc_start + b * T, doc_end + b * T  # doc_end: where the next document starts, or T
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
        for q_stream in range(NQ):
            head, row = _head(b, q_stream, q_h, NQ, T, H, D), ((b * H + q_h) * NQ + q_stream) * T
            strict = tl.where(k_stream > FIRST + q_stream, 1, 0)
            end = tl.where(strict > reach, first, end_of_last)
            walk = _walk(first + strict, last + strict, end_of_first, end, BLOCK_Q)
            for FULL in tl.static_range(2):
                for i in range(_tile_count(walk, FULL)):
                    q_first = _tile_start(walk, i, FULL, BLOCK_Q)
                    q_pos = q_first + tl.arange(0, BLOCK_Q)
                    q_tile = _load(q + head, q_first, T, H, D, BLOCK_Q, FULL)
                    grad_tile = _load(grad + head, q_first, T, H, D, BLOCK_Q, FULL)
                    q_lse = _load_scalars(lse + row, q_pos, T, float('inf'), FULL)  # inf: p is 0 there
                    q_delta = _load_scalars(delta + row, q_pos, T, 0.0, FULL)
                    s = tl.dot(k_tile, tl.trans(q_tile), input_precision='ieee')  # (keys, queries)
                    if not FULL:
                        q_doc_start = _load_scalars(doc_start, q_pos, T, 0, False).to(tl.int32)
                        seen = _sees(q_pos[None, :], q_doc_start[None, :], k_pos[:, None], strict, reach)
                        s = tl.where(seen, s, float('-inf'))
                    p = tl.exp2(s * (scale * LOG2_E) - q_lse[None, :])
                    dv_acc = tl.dot(p.to(grad_tile.dtype), grad_tile, dv_acc, input_precision='ieee')
                    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision='ieee')
                    ds = p * (dp - q_delta[None, :])
                    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision='ieee')
    _store(dk + k_head, first, T, HK, dk_acc * scale, D, BLOCK_K)
    _store(dv + k_head, first, T, HK, dv_acc, D, BLOCK_K)


def _launch(kernel, result, tensors, pattern):
    """Launch a kernel over all heads and tiles: tiles of keys for 'dk, dv', otherwise of queries.

    Tiles vary fastest, so that programs that run together share a head's keys. pattern: reach of x
    keys, reach of rho keys, first query stream.
    """
    q, k, _, doc_start, *_ = tensors
    (B, _, H, D), HK, T, (reach_x, reach_rho, first) = q.shape, k.shape[2], doc_start.shape[1], pattern
    NQ, NK = q.shape[1] // T, k.shape[1] // T
    block_q, block_k, warps, stages = TILES[D, 8 * q.element_size()][result]
    grid = (NK * triton.cdiv(T, block_k), B * HK) if result == 'dk, dv' else (NQ * triton.cdiv(T, block_q), B * H)
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


_NAMESPACE = __name__.replace('.', '_')
_forward_op = torch.library.custom_op(f'{_NAMESPACE}::triton_attention', _forward, mutates_args=())
_backward_op = torch.library.custom_op(f'{_NAMESPACE}::triton_attention_backward', _backward, mutates_args=())
_forward_op.register_fake(_empty_outputs)
_backward_op.register_fake(_empty_gradients)
_forward_op.register_autograd(_call_backward, setup_context=_save_for_backward)


def triton_attention(q, k, v, doc_start, reaches, T, first=0):
    """Compute attention with the Triton kernels, for the patterns in PINS.

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
    q, k = q.to(v.dtype), k.to(v.dtype)  # as in `_flex_attention`
    return _forward_op(*(x.contiguous() for x in (q, k, v, doc_start)), pattern)[0]
