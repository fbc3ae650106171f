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

B batch, T positions, H heads, D head size, S slots of a cache, n positions of a run, N rows, C width, V vocabulary.
"""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DENSE_T = 1024  # up to this T, bf16 attention on CPU keeps its probabilities for the backward: faster (bench/attention.py), but T^2 memory
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
    T = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # PyTorch's attention wants (B, H, T, D)
    on_cpu = q.device.type == 'cpu'
    dense = on_cpu and q.dtype == torch.bfloat16 and T <= DENSE_T
    if doc_start is None and (window is None or window >= T - 1) and not dense:
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
    T, windows, on_cpu = q.shape[2], stream_windows(persistent, window, persistent_window), q.device.type == 'cpu'
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
    return (x * r).mul_(weight).to(dtype), r


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


def linear_cross_entropy_reference(hidden, weight, targets):
    """`linear_cross_entropy` as its definition, with all logits in memory."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=-1)


def linear_cross_entropy(hidden, weight, targets, max_logits=2 ** 26):
    """Mean negative log-likelihood in nats of targets under softmax(hidden weight^T), without holding all logits.

    hidden (N, C), weight (V, C), targets (N,) int64 with -1 for rows that do not count; at most max_logits logits exist at a
    time. Products run in the autocast dtype, the softmax in fp32. Returns a scalar; 0 if no row counts.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk_rows = max(1, max_logits // (256 * weight.shape[0])) * 256  # whole tiles of the products
    return _LinearCrossEntropy.apply(hidden, weight, targets, dtype, chunk_rows)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is formed in the forward, while a chunk's logits are at hand: three products, where recomputing takes four."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, chunk_rows):
        with_grad = any(ctx.needs_input_grad)
        counts = targets >= 0
        h, w = hidden.to(dtype), weight.to(dtype)
        h_counted = h * counts.unsqueeze(1)  # so that rows that do not count add nothing to weight's gradient
        on_cpu = h.device.type == 'cpu'
        softmax_rows = max(1, 2 ** 20 // w.shape[0]) if on_cpu else chunk_rows  # on CPU a part stays in the cache
        softmax_dtype = torch.promote_types(dtype, torch.float32)
        loss = torch.zeros((), dtype=softmax_dtype, device=h.device)
        grad_h = torch.empty_like(h) if with_grad else None
        grad_w = None
        with torch.autocast(h.device.type, enabled=False):
            for a in range(0, h.shape[0], chunk_rows):
                rows = slice(a, a + chunk_rows)
                logits = h[rows] @ w.T
                for part, target, count in zip(*(x.split(softmax_rows) for x in (logits, targets[rows], counts[rows]))):
                    p = torch.softmax(part, -1, dtype=softmax_dtype)
                    index = target.clamp(min=0).unsqueeze(1)
                    p_target = p.gather(1, index).squeeze(1)
                    if on_cpu and p_target.min() > 1e-30:
                        nll = -p_target.log()
                    else:  # the target's probability may underflow, the largest one cannot
                        nll = part.amax(-1).to(p.dtype) - p.amax(-1).log() - part.gather(1, index).squeeze(1)
                    loss += (nll * count).sum()
                    if with_grad:  # d nll / d logits = softmax - one_hot, written over the logits
                        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
                        part.copy_(p)
                if with_grad:
                    torch.mm(logits, w, out=grad_h[rows])
                    part = logits.T @ h_counted[rows]
                    grad_w = part.to(weight.dtype) if grad_w is None else grad_w.add_(part)
        scale = 1 / counts.sum().clamp(min=1).to(softmax_dtype)
        if with_grad:
            ctx.save_for_backward(grad_h, grad_w, counts, scale)
            ctx.hidden_dtype = hidden.dtype
        return loss * scale

    @staticmethod
    def backward(ctx, grad):
        grad_h, grad_w, counts, scale = ctx.saved_tensors
        scale = scale * grad
        return (grad_h * (counts * scale).unsqueeze(1)).to(ctx.hidden_dtype), grad_w * scale.to(grad_w.dtype), None, None, None
