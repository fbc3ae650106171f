"""GPN's steps on a GPU. Read the plain functions, then `KernelSteps.step`.

A plain PyTorch function is several kernels. torch.compile makes one of `gated_add_norm`. `glu`,
`memory_inputs` and `delta_step` are each followed by the Triton kernel that equals it, run by
`launch_NAME`, and by its gradient, `launch_NAME_backward`. Only the tests run these three plain
functions: they compare the kernels with them, and their gradients with autograd.

A kernel's program computes a row, a head of a row or some columns of a head, in fp32, or in float64
for float64 inputs. Products z may be narrower. carry: (N, 1), 0 in rows where a document starts,
else 1; None: all ones. N is a number of rows. H = 0 heads give empty tensors. Other letters as in
model_gpn.py.
"""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from attn_kernels import at_least_fp32, compiled

from . import constexpr, jit, tl, triton


def _launch(kernel, grid, warps, *args):
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, num_warps=warps, num_stages=1)


def _power_of_2(n):
    return triton.next_power_of_2(max(n, 1))


@jit
def _wide(x):
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@jit
def _load(x, i, seen):
    return _wide(tl.load(x + i, mask=seen, other=0.0))


# ---- norms, and the gates around them ----

def l2_normalize(x, eps):
    """Return x / sqrt(|x|^2 + eps^2) over the last axis, and the divisor."""
    length = (x.square().sum(-1, keepdim=True) + eps ** 2).sqrt()
    return x / length, length


def gated_add_norm(z, x, add, eps, dtype, carry=None):
    """Return y = sigmoid(z) carry x + add (eq. 4, 7, 11), and `l2_normalize`(y) in dtype.

    x: (N, C), fp32 or float64; z, add: (N, C).
    """
    gated = torch.sigmoid(at_least_fp32(z)) * x
    y = add + (gated if carry is None else gated * carry)
    return y, l2_normalize(y, eps)[0].to(dtype)


def norm_and_gate_backward(grad, normed, inverse, grad_y, gate, carry=None):
    """Return carry times the gradient of a state x (N, C), which is both normalized and gated.

    grad: gradient of normed = `l2_normalize`(x); grad_y: of gate x; inverse: 1 / length of x.
    """
    grad = at_least_fp32(grad)
    out = (grad - normed * (grad * normed).sum(-1, keepdim=True)) * inverse + grad_y * gate
    return out if carry is None else out * carry


# ---- the gated feed-forward net and memory read ----

def glu(z, memory_read, eps, dtype):
    """Return silu(z1) * (z2, `l2_normalize`(memory_read)) in dtype: eq. 5's FFN and eq. 11's gate.

    z: (N, Y + F) is z1 (N, Y) and z2 (N, F); memory_read: (N, Y - F).
    """
    z1, z2 = at_least_fp32(z).tensor_split([(z.shape[1] + memory_read.shape[1]) // 2], 1)
    other = torch.cat([z2, l2_normalize(at_least_fp32(memory_read), eps)[0]], 1)
    return (F.silu(z1) * other).to(dtype)


@jit
def _glu_kernel(z, memory_read, y, Y, HD, z_stride, eps: constexpr, FFN: constexpr, READ: constexpr):
    """See `glu`. Y = F + HD: the last HD columns are for the memory read."""
    row, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, FFN), tl.arange(0, READ)
    z, y, seen = z + row * z_stride, y + row * Y, i < Y - HD
    z1 = _load(z, i, seen)
    tl.store(y + i, z1 * tl.sigmoid(z1) * _load(z, Y + i, seen), mask=seen)
    read, z1 = _load(memory_read, row * HD + j, j < HD), _load(z, Y - HD + j, j < HD)
    normed = read / tl.sqrt(tl.sum(read * read, 0) + eps * eps)
    tl.store(y + Y - HD + j, z1 * tl.sigmoid(z1) * normed, mask=j < HD)


def launch_glu(z, memory_read, eps, dtype):
    """Compute `glu`. z may be columns of a wider product."""
    HD = memory_read.shape[1]
    Y = (z.shape[1] + HD) // 2
    y = z.new_empty(len(z), Y, dtype=dtype)
    _launch(_glu_kernel, (len(z),), 8, z, memory_read, y, Y, HD, z.stride(0), eps, _power_of_2(Y - HD), _power_of_2(HD))
    return y


@jit
def _glu_backward_kernel(z, memory_read, grad, out, y, grad_read, Y, HD, z_stride, out_stride, eps: constexpr,
                         FFN: constexpr, READ: constexpr):
    row, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, FFN), tl.arange(0, READ)
    z, grad, out, y, seen = z + row * z_stride, grad + row * Y, out + row * out_stride, y + row * Y, i < Y - HD
    z1, other, g = _load(z, i, seen), _load(z, Y + i, seen), _load(grad, i, seen)
    sigmoid = tl.sigmoid(z1)
    tl.store(y + i, sigmoid * z1 * other, mask=seen)
    tl.store(out + i, g * other * sigmoid * (1 + z1 * (1 - sigmoid)), mask=seen)
    tl.store(out + Y + i, g * sigmoid * z1, mask=seen)
    seen = j < HD
    read, z1, g = _load(memory_read, row * HD + j, seen), _load(z, Y - HD + j, seen), _load(grad, Y - HD + j, seen)
    inverse, sigmoid = 1 / tl.sqrt(tl.sum(read * read, 0) + eps * eps), tl.sigmoid(z1)
    normed = read * inverse
    tl.store(y + Y - HD + j, sigmoid * z1 * normed, mask=seen)
    tl.store(out + Y - HD + j, g * normed * sigmoid * (1 + z1 * (1 - sigmoid)), mask=seen)
    g *= sigmoid * z1
    tl.store(grad_read + row * HD + j, (g - normed * tl.sum(g * normed, 0)) * inverse, mask=seen)


def launch_glu_backward(grad, z, memory_read, eps, out, y):
    """Return memory_read's gradient; write z's to out and `glu`'s result to y. grad: (N, Y)."""
    HD = memory_read.shape[1]
    Y = (z.shape[1] + HD) // 2
    grad_read = torch.empty_like(memory_read, dtype=torch.promote_types(z.dtype, torch.float32))
    _launch(_glu_backward_kernel, (len(z),), 8, z, memory_read, grad, out, y, grad_read, Y, HD, z.stride(0),
            out.stride(0), eps, _power_of_2(Y - HD), _power_of_2(HD))
    return grad_read


# ---- queries, and what the memory's write needs ----

def key_of(z, heads, eps):
    """Return a key or query (..., H, K), eq. 8, from its projection z (..., HK). heads: (H, K)."""
    return l2_normalize(F.relu(z.unflatten(-1, heads)), eps)[0]


def memory_inputs(z, rates, heads):
    """Return the memory's inputs (eq. 8, 9): q, k (N, H, K), v (N, H, D), beta, decay (N, H).

    z has columns query HK, key HK, value HD, beta H, decay H; rates (2, H): exp(A) and dt_bias;
    heads: H, K, D, eps of keys. Without rates, z is the query's columns, and the result is [q].
    """
    H, K, D, eps = heads
    if rates is None:
        return [key_of(at_least_fp32(z), (H, K), eps)]
    q, k, v, beta, decay = at_least_fp32(z).split([H * K, H * K, H * D, H, H], 1)
    q, k = key_of(q, (H, K), eps), key_of(k, (H, K), eps)
    return [q, k, v.unflatten(1, (H, D)), torch.sigmoid(beta), torch.exp(-rates[0] * F.softplus(decay + rates[1]))]


@jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    more = 1 + small
    log1p = tl.where(more == 1, small, tl.log(more) * small / (more - 1))  # log(1 + small), accurate near 0
    return tl.maximum(x, 0) + log1p


@jit
def _normalized_key(z, i, seen, eps: constexpr):
    """Return a row's key or query, the mask of its ReLU, and 1 / its length."""
    x = _load(z, i, seen)
    x = tl.where(x < 0, 0.0, x)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) + eps * eps)
    return x * inverse, x > 0, inverse


@jit
def _memory_inputs_kernel(z, rates, q, k, v, beta, decay, H, z_stride, eps: constexpr, K: constexpr, D: constexpr,
                          ROWS: constexpr, COLUMNS: constexpr):
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, place = z + row * z_stride, row * H + head
    key, _, _ = _normalized_key(z + head * K, i, i < K, eps)
    tl.store(q + place * K + i, key, mask=i < K)
    if rates is not None:
        key, _, _ = _normalized_key(z + (H + head) * K, i, i < K, eps)
        tl.store(k + place * K + i, key, mask=i < K)
        z += 2 * H * K
        tl.store(v + place * D + j, _load(z + head * D, j, j < D), mask=j < D)
        z += H * D + head
        tl.store(beta + place, tl.sigmoid(_wide(tl.load(z))))
        a = _wide(tl.load(z + H)) + tl.load(rates + H + head)
        tl.store(decay + place, tl.exp(-tl.load(rates + head) * _softplus(a)))


def launch_memory_inputs(z, rates, heads):
    """Compute `memory_inputs`. z may be columns of a wider product."""
    H, K, D, eps = heads
    shapes = [(H, K), (H, K), (H, D), (H,), (H,)] if rates is not None else [(H, K)]
    fp32 = torch.promote_types(z.dtype, torch.float32)
    outputs = [z.new_empty(len(z), *shape, dtype=fp32) for shape in shapes]
    unused = [None] * (5 - len(outputs))
    _launch(_memory_inputs_kernel, (len(z), H), 1, z, rates, *outputs, *unused, H, z.stride(0), eps, K, D,
            _power_of_2(K), _power_of_2(D))
    return outputs


@jit
def _memory_inputs_backward_kernel(z, rates, grad_q, grad_k, grad_v, grad_beta, grad_log, next_carry, out, grad_rate,
                                   H, z_stride, out_stride, eps: constexpr, K: constexpr, D: constexpr, ROWS: constexpr,
                                   COLUMNS: constexpr):
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, out, place, seen = z + row * z_stride, out + row * out_stride, row * H + head, i < K
    key, passed, inverse = _normalized_key(z + head * K, i, seen, eps)
    g = _load(grad_q, place * K + i, seen)
    tl.store(out + head * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
    if rates is not None:
        key, passed, inverse = _normalized_key(z + (H + head) * K, i, seen, eps)
        g = _load(grad_k, place * K + i, seen)
        if next_carry is not None:
            g *= tl.load(next_carry + row)
        tl.store(out + (H + head) * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
        tl.store(out + 2 * H * K + head * D + j, _load(grad_v, place * D + j, j < D), mask=j < D)
        beta_column = 2 * H * K + H * D + head
        decay_column = beta_column + H
        beta, g_log = tl.sigmoid(_wide(tl.load(z + beta_column))), tl.load(grad_log + place)
        a = _wide(tl.load(z + decay_column)) + tl.load(rates + H + head)
        tl.store(out + beta_column, tl.load(grad_beta + place) * beta * (1 - beta))
        tl.store(out + decay_column, -g_log * tl.load(rates + head) * tl.sigmoid(a))
        tl.store(grad_rate + place, -g_log * _softplus(a))


def launch_memory_inputs_backward(z, rates, heads, out, grads, grad_rate=None, next_carry=None):
    """Write z's gradient to out and, if rates is given, each row's gradient of exp(A) to grad_rate.

    grads: of q, k, v, beta and log(decay) from `memory_inputs`; without rates, of q only. The
    gradient of k is multiplied by next_carry.
    """
    H, K, D, eps = heads
    unused = [None] * (5 - len(grads))
    _launch(_memory_inputs_backward_kernel, (len(z), H), 1, z, rates, *grads, *unused, next_carry, out, grad_rate, H,
            z.stride(0), out.stride(0), eps, K, D, _power_of_2(K), _power_of_2(D))


# ---- the gated delta rule: one write and one read ----

def read_heads(memory, x):
    """Return memory^T x per head: memory (B, H, n, p), x (B, H, n) -> (B, H, p)."""
    return torch.bmm(x.reshape(-1, 1, x.shape[-1]), memory.flatten(0, 1)).view(*x.shape[:2], memory.shape[-1])


def delta_step(memory, write, q, carry=None, first_key=None):
    """Return the memory (B, H, K, D) after one write, eq. 10, and what q reads from it (B, H, D).

    write: k (B, H, K), v (B, H, D), beta and decay (B, H); q: (B, H, K). Where carry (B, 1) is 0,
    the memory is emptied first, and the key is first_key (H, K).
    """
    k, v, beta, decay = write
    if carry is not None:
        memory, k = memory * carry[..., None, None], torch.where(carry.unsqueeze(-1) > 0, k, first_key)
    error = v - read_heads(memory, k)
    memory = decay[..., None, None] * memory + (beta.unsqueeze(-1) * k).unsqueeze(-1) * error.unsqueeze(-2)
    return memory, read_heads(memory, q)


# Columns of M (value dimensions) are independent. A program computes DELTA_COLUMNS of them, with
# all rows of one head, and a step is one pass over M.

DELTA_COLUMNS, DELTA_WARPS = 32, 4


@jit
def _delta_kernel(memory, out, k, v, beta, decay, q, read, carry, first_key, BH, H, D, S: constexpr, K: constexpr,
                  ROWS: constexpr, TILE: constexpr):
    """Run S steps. memory: (BH, K, D); out: (S, BH, K, D); carry: (S, B); others (S, BH, ...)."""
    head, row, column = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    m = tl.load(memory + head * K * D + place, mask=seen, other=0.0)
    for t in range(0, S):
        i = t * BH + head
        key = tl.load(k + i * K + row, mask=row < K, other=0.0)
        if carry is not None:
            carries = tl.load(carry + i // H)
            m *= carries
            if first_key is not None:
                key = tl.where(carries > 0, key, tl.load(first_key + head % H * K + row, mask=row < K, other=0.0))
        error = tl.load(v + i * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
        m = m * tl.load(decay + i) + (key * tl.load(beta + i))[:, None] * error[None, :]
        tl.store(out + i * K * D + place, m, mask=seen)
        if q is not None:
            query = tl.load(q + i * K + row, mask=row < K, other=0.0)
            tl.store(read + i * D + column, tl.sum(m * query[:, None], 0), mask=column < D)


def _launch_delta(S, memory, out, *others):
    """Launch `_delta_kernel`. others: its arguments from k to first_key."""
    B, H, K, D = memory.shape
    inputs = (x if x is None else x.contiguous() for x in others)
    _launch(_delta_kernel, (B * H, triton.cdiv(D, DELTA_COLUMNS)), DELTA_WARPS, memory, out, *inputs, B * H, H, D, S, K,
            _power_of_2(K), DELTA_COLUMNS)


def launch_delta_step(memory, out, write, q, carry=None, first_key=None):
    """Compute `delta_step`: store the new memory in out, which may be `memory`; return the read."""
    read = torch.empty_like(write[1])
    _launch_delta(1, memory, out, *write, q, read, carry, first_key)
    return read


def launch_delta_replay(memory, write, carry=None):
    """Recompute the memories (S + 1, B, H, K, D) before and after S steps, starting with `memory`.

    write, carry: as for `delta_step`, with a leading axis S; k already has first_key filled in.
    """
    S = len(write[0])
    memories = memory.new_empty(S + 1, *memory.shape)
    memories[0] = memory
    _launch_delta(S, memory, memories[1:], *write, None, None, carry, None)
    return memories


@jit
def _delta_backward_kernel(grad, memory, k, v, beta, decay, q, grad_read, carry, shares, grad_v, scalars, BH, H, D,
                           K: constexpr, ROWS: constexpr, TILE: constexpr):
    """Backward of one step: updates grad (BH, K, D), the memory's gradient, and writes the others.

    Per tile: shares (tiles, 2, BH, K) of q and k, scalars (tiles, 2, BH) of beta and log(decay).
    With e = v - m^T k, m' = decay m + beta k e^T and the read r = m'^T q, let gr be the gradient of
    r, and g that of m', including the read's share q gr^T. The gradients are
        q   m' gr               v      gv = beta g^T k    log(decay)   decay <g, m>
        k   beta g e - m gv     beta   k^T g e            m            decay g - k gv^T
    """
    head, tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS)
    column = tile * TILE + tl.arange(0, TILE)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = head * K * D + row[:, None] * D + column[None, :]
    m = tl.load(memory + place, mask=seen, other=0.0)
    if carry is not None:
        m *= tl.load(carry + head // H)
    key = tl.load(k + head * K + row, mask=row < K, other=0.0)
    query = tl.load(q + head * K + row, mask=row < K, other=0.0)
    gr = tl.load(grad_read + head * D + column, mask=column < D, other=0.0)
    g = tl.load(grad + place, mask=seen, other=0.0) + query[:, None] * gr[None, :]
    d, b = tl.load(decay + head), tl.load(beta + head)
    error = tl.load(v + head * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
    gv = tl.sum(g * key[:, None], 0) * b
    to_key = tl.sum(g * error[None, :], 1)
    gq = d * tl.sum(m * gr[None, :], 1) + b * key * tl.sum(error * gr, 0)  # the memory after the step times gr
    gk = b * to_key - tl.sum(m * gv[None, :], 1)
    tl.store(shares + (tile * 2 * BH + head) * K + row, gq, mask=row < K)
    tl.store(shares + (tile * 2 * BH + BH + head) * K + row, gk, mask=row < K)
    tl.store(scalars + tile * 2 * BH + head, tl.sum(key * to_key, 0))
    tl.store(scalars + tile * 2 * BH + BH + head, d * tl.sum(tl.sum(g * m, 1), 0))
    tl.store(grad_v + head * D + column, gv, mask=column < D)
    g = d * g - key[:, None] * gv[None, :]
    if carry is not None:
        g *= tl.load(carry + head // H)
    tl.store(grad + place, g, mask=seen)


def launch_delta_step_backward(grad, memory, write, q, grad_read, carry=None):
    """Return the gradients of `delta_step`: q, k, v, beta, log(decay).

    grad: (B, H, K, D), gradient of the memory after the step, updated to that before it; memory:
    before the step; write: with first_key filled in; grad_read: (B, H, D), gradient of the read.
    """
    B, H, K, D = memory.shape
    tiles = triton.cdiv(D, DELTA_COLUMNS)
    shares, scalars = memory.new_empty(tiles, 2, B, H, K), memory.new_empty(tiles, 2, B, H)
    grad_v = torch.empty_like(write[1])
    inputs = (x if x is None else x.contiguous() for x in (*write, q, grad_read, carry))
    _launch(_delta_backward_kernel, (B * H, tiles), DELTA_WARPS, grad, memory, *inputs, shares, grad_v, scalars, B * H,
            H, D, K, _power_of_2(K), DELTA_COLUMNS)
    (grad_q, grad_k), (grad_beta, grad_log) = shares.sum(0), scalars.sum(0)
    return grad_q, grad_k, grad_v, grad_beta, grad_log


# ---- steps ----

def unbind_steps(tensors):
    """Turn {name: (S, ...)} into S namespaces; one unbind is faster than indexing each step."""
    return [SimpleNamespace(**dict(zip(tensors, row))) for row in zip(*(x.unbind() for x in tensors.values()))]


class KernelSteps:
    """Steps of a segment on a GPU, with the weights from `fold`; their products run in dtype.

    `load` copies new weights in place, so captured CUDA graphs use them.
    """

    def __init__(self, folded, sizes, norm_eps, dtype):
        n, fp32 = 2 + 3 * sizes.n_layer, torch.promote_types(dtype, torch.float32)
        self.sizes, self.dtype, self.graphs = sizes, dtype, {}
        self.state_eps, self.read_eps, key_eps = sizes.eps(norm_eps)
        self.heads = sizes.n_head, sizes.d_k, sizes.d_v, key_eps  # as `memory_inputs` takes them
        with torch.inference_mode(False):
            self.tensors = [torch.empty_like(x, dtype=dtype if i < n else fp32) for i, x in enumerate(folded)]
            self.rates = self.tensors[-1].new_empty(2, sizes.n_head)  # exp(A) and dt_bias of eq. 9
        self.ground, self.layers = self.tensors[:2], [self.tensors[i:i + 3] for i in range(2, n, 3)]
        self.first_key, is_gpu = self.tensors[-1], self.rates.is_cuda
        self.gated_add_norm = compiled(gated_add_norm) if is_gpu else gated_add_norm
        self.norm_and_gate_backward = compiled(norm_and_gate_backward) if is_gpu else norm_and_gate_backward
        self.load(folded)

    @torch.no_grad()
    def load(self, folded):
        for own, x in zip(self.tensors, folded):
            own.copy_(x)
        end = sum(self.sizes.columns(0)[:2])
        decay = slice(end - self.sizes.n_head, end)
        self.layers[0][1][decay] = 0  # dt_bias is added in fp32, as in `Write.log_decay`
        self.rates.copy_(torch.stack([folded[-2], folded[3][decay]]))
        return self

    def step(self, s, normed, k, memory, u, carry=None):
        """Compute `Model.step`, given the previous key instead of the previous grounded state.

        s, u: (B, C); normed: `l2_normalize`(s); k: (B, H, K); memory: (B, H, K, D), updated in
        place; carry: (B, 1), 0 where a document starts. Returns s, normed, k; for the backward,
        states and products. Where a document starts, z still comes from the previous document's s.
        That is harmless only because eq. 4 multiplies its gate by s, which carry makes 0.
        """
        z = F.linear(normed, *self.ground)
        states, products = [], [z]
        x, normed = self.gated_add_norm(z, s, u, self.state_eps, self.dtype, carry)  # eq. 4
        for i, (w_in, b_in, w_out) in enumerate(self.layers):
            z = F.linear(normed, w_in, b_in)
            gate_in, memory_in, glu_in = z.split(self.sizes.columns(i), -1)
            if i == 0:
                q, next_k, v, beta, decay = launch_memory_inputs(memory_in, self.rates, self.heads)  # eq. 8, 9
                write = k, v, beta, decay
                memory_read = launch_delta_step(memory, memory, write, q, carry, self.first_key)  # eq. 10
            else:
                memory_read = read_heads(memory, *launch_memory_inputs(memory_in, None, self.heads))
            memory_read = memory_read.flatten(1)
            products += [z, memory_read]
            y = launch_glu(glu_in, memory_read, self.read_eps, self.dtype)
            x, normed = self.gated_add_norm(gate_in, x, F.linear(y, w_out), self.state_eps, self.dtype)  # eq. 7, 11
            states.append(x)
        return x, normed, next_k, states, products

    def steps(self, s, k, memory, u, carry=None):
        """Run S steps. u: (S, B, C); carry: (S, B, 1) in u's dtype; memory is updated in place.

        Returns s (B, C), k (B, H, K), memory (B, H, K, D), the layers' states and the products,
        both (S, B, ...).
        """
        normed, outputs = l2_normalize(s, self.state_eps)[0].to(self.dtype), []
        for t in range(len(u)):
            s, normed, k, states, products = self.step(s, normed, k, memory, u[t], None if carry is None else carry[t])
            outputs.append((*states, *products))
        return s, k, memory, [torch.stack(x) for x in zip(*outputs)]

    def backward(self, u, carry, start, grads, saved, is_cut):
        """Compute the gradients of `steps`.

        start: state before each step (S, B, C), key (B, H, K) and memory before the first step
        grads: gradients of the predicted states (S, B, C), last state, next key and memory
        saved: results of `steps`, without the last layer's states
        is_cut: truncated BPTT ends here: the next key's gradient goes to the key's weights only

        Returns the gradients of u, the first state, key and memory, the decay rates and the zero
        state's key; and for each weight, a pair of matrices whose product is its gradient. d below:
        gradient of the layer's output, then of its input.
        """
        S, L, (grad, ds, dk, dm) = len(u), self.sizes.n_layer, grads
        ground, layers = self.recompute(u, carry, start, saved)
        ground_steps, layer_steps = unbind_steps(ground), [unbind_steps(layer) for layer in layers]
        douts, du, dks = [[] for _ in range(L)], [], []
        # dks keeps unmasked gradients, for first_key, so step t applies the carry of step t + 1.
        # The last step needs none: the next segment has masked its dk below
        carries = [None] * (S + 1) if carry is None else [*carry, None]
        for t in reversed(range(S)):
            d = ds + grad[t]
            for i in reversed(range(L)):
                at, (w_in, _, w_out) = layer_steps[i][t], self.layers[i]
                douts[i].append(d)
                torch.mul(d, at.slope, out=at.d_gate_in)  # eq. 7
                dread = launch_glu_backward(d.to(self.dtype) @ w_out, at.glu_in, at.memory_read, self.read_eps,
                                            at.d_glu_in, at.y)
                if i == 0:  # from the gradient of the key that this step makes to that of the key it uses
                    dk = self.write_backward(at, dread, dk, dm, carries[t], carries[t + 1])
                    dks.append(dk)
                else:
                    self.read_backward(at, dread, dm)
                dz = at.dz  # complete: its columns are d_gate_in, d_memory_in and d_glu_in
                if i == 0 and is_cut and t == S - 1:  # the next key's columns reach its weights, but not x
                    dz = dz.clone()
                    dz[:, self.sizes.next_key()] = 0
                d = self.norm_and_gate_backward(dz @ w_in, at.normed, at.inverse, d, at.gate)
            at = ground_steps[t]
            du.append(d)  # eq. 4 adds u, so the grounded state's gradient is u's
            torch.mul(d, at.slope, out=at.dz)  # eq. 4
            ds = self.norm_and_gate_backward(at.dz @ self.ground[0], at.normed, at.inverse, d, at.gate, carries[t])

        def stack(last_first):
            return torch.stack(last_first[::-1])

        drate, dfirst = layers[0]['drate'].sum((0, 1)), torch.zeros_like(self.first_key)
        if carry is not None:  # document starts use first_key, so it gets the gradients of their keys
            dfirst, dk = (stack(dks) * (1 - carry.unsqueeze(-1))).sum((0, 1)), dk * carry[0].unsqueeze(-1)
        pairs = [(ground['dz'], ground['normed'])]
        for i, layer in enumerate(layers):
            pairs += [(layer['dz'], layer['normed']), (stack(douts[i]), layer['y'])]
        return stack(du), ds, dk, dm, drate, dfirst, pairs

    def recompute(self, u, carry, start, saved):
        """Compute, for all steps at once, the values that `backward` needs.

        Returns {name: (S, B, ...)} of the ground gate and of each layer:
            normed, inverse, gate, slope      n(x), 1 / |x|, sigmoid(z), x sigmoid'(z)
            gate_in, memory_in, glu_in        columns of z; d_gate_in, ...: those of dz
            q, memory_read, memory            and in the first layer, k, v, beta, decay of the write
            dz, y, drate                      room, which `backward` fills
        """
        (s, k, memory), (S, B, _), (H, _, D, _) = start, u.shape, self.heads
        states, products = saved[:self.sizes.n_layer - 1], iter(saved[self.sizes.n_layer - 1:])
        s = s if carry is None else s * carry
        ground, layers = self.gated(s, next(products)), []
        for i, x in enumerate([torch.addcmul(u, ground['gate'], s), *states]):
            z, widths = next(products), self.sizes.columns(i)
            layer = self.gated(x, z)
            layer |= dict(zip(('gate_in', 'memory_in', 'glu_in'), z.split(widths, -1)))
            layer |= dict(zip(('d_gate_in', 'd_memory_in', 'd_glu_in'), layer['dz'].split(widths, -1)))
            found = launch_memory_inputs(layer['memory_in'].flatten(0, 1), None if i else self.rates, self.heads)
            q, *write = (x.unflatten(0, (S, B)) for x in found)
            if i == 0:
                next_k, v, beta, decay = write
                k = torch.cat([k.unsqueeze(0), next_k[:-1]])
                k = k if carry is None else torch.where(carry.unsqueeze(-1) > 0, k, self.first_key)
                memories = launch_delta_replay(memory, (k, v, beta, decay), carry)
                layer |= dict(k=k, v=v, beta=beta, decay=decay, drate=u.new_empty(S, B, H))
            # a read takes the memory after the step; layer one's write takes that before it
            layer |= dict(q=q, memory_read=next(products), memory=memories[1:] if i else memories[:-1],
                          y=u.new_empty(S, B, self.sizes.n_ffn + H * D, dtype=self.dtype))
            layers.append(layer)
        return ground, layers

    def gated(self, x, z):
        """Return the values of `recompute` that a gate of x, from z, and x's norm need."""
        (normed, length), gate = l2_normalize(x, self.state_eps), torch.sigmoid(z[..., :x.shape[-1]].to(x.dtype))
        return dict(normed=normed, inverse=1 / length, gate=gate, slope=x * gate * (1 - gate),
                    dz=torch.empty_like(z))

    def write_backward(self, at, dread, dk, dm, carry, next_carry):
        """Backward of eq. 8 to 10 at one step. Returns the gradient of the key used in the write.

        dread: gradient of the memory read; dk: of the key for the next step; dm: of the memory
        after the step, updated in place to that of the memory before.
        """
        write, dread = (at.k, at.v, at.beta, at.decay), dread.view_as(at.v)
        dq, dk_used, *others = launch_delta_step_backward(dm, at.memory, write, at.q, dread, carry)
        launch_memory_inputs_backward(at.memory_in, self.rates, self.heads, at.d_memory_in, (dq, dk, *others), at.drate,
                                      next_carry)
        return dk_used

    def read_backward(self, at, dread, dm):
        """Backward of a read above the first layer. Adds the memory's gradient to dm."""
        dread = dread.view(*at.q.shape[:2], self.sizes.d_v)
        dq = read_heads(at.memory.transpose(-1, -2), dread)
        dm.addcmul_(at.q.unsqueeze(-1), dread.unsqueeze(-2))
        launch_memory_inputs_backward(at.memory_in, None, self.heads, at.d_memory_in, (dq,))


class Graph:
    """A function of tensors captured as a CUDA graph. Each call overwrites the last results."""

    def __init__(self, function, inputs):
        self.inputs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: compiling kernels cannot be captured
            function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):  # NCCL's thread may run
            self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(tree_leaves(self.inputs), tree_leaves(inputs)):
            if isinstance(own, torch.Tensor):
                own.copy_(x)
        self.graph.replay()
        return self.results
