"""A fast `Model.loop` for model_gpn: `scan_window` for training, `Decoder` for decoding.

* Each RMSNorm's weight is folded into the next matrix (`fold`). The rest, x / sqrt(|x|^2 + eps^2),
  is the same for all matrices that read x. So a layer has two products: an input product for gate,
  query, write and feed-forward net, and an output product.
* The next token needs only a key made from the grounded state g, so k is kept instead of g.
* Only the gradients of s, k and M are computed step by step. Each weight's gradient is one large
  product per segment (`scan_backward`).
* On a CPU, a segment is one C call (`CSteps`, gpn.c). On a GPU, it is a CUDA graph of products and
  Triton kernels (`KernelSteps`). Without a C compiler or Triton, `runs_on` returns False.

Memory in training, for R = T / S segments of S = segment_len steps: states L T B C, products T B W
with W = C + L (C + 2F) + H ((L + 1) K + (2L + 1) D + 2), and M at each segment's start, R B H K D.
The backward adds (S + 1) B H K D for one segment's M and a few times S B W. M of all T steps is
never stored.

Letters as in model_gpn.py; N rows, S steps per segment, R segments.
"""
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

import scans
from attn_kernels import outside_graphs
from scans import constexpr, jit, tl, triton

PINS = {'1df45c0ba63389b0'}  # digests of what `implements` lists; python -m scans gpn
SMALL = dict(n_layer=2, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, segment_len=5,
             eos_id=59, bptt_len=7)  # a model that uses every branch, for tests and `python -m scans`
KEY_EPS = 1e-6  # eps of `l2_normalize` in model_gpn.py


def implements(model_file):
    """Return the code that this file re-implements, so that edits to it are detected."""
    m = model_file
    return [m.RMSNorm, m.l2_normalize, m.read, m.Write, m.Layer, m.choose_rows, m.Model.__init__, m.Model.ground,
            m.Model.predict, m.Model.step, m.Model.first_state, m.Model.loop, m.Model.advance]


def runs_on(device):
    """Return True on a GPU with Triton, and on a CPU with a C compiler."""
    if device.type == 'cuda' and triton is not None or scans.KERNELS_ON_CPU:
        return True
    return _compiles_c(device.type)


@outside_graphs
@functools.cache
def _compiles_c(device_type):
    if device_type == 'cpu' and _build(torch.float32) is not None:
        return True
    if device_type != 'meta':
        print(f"GPN's equations run step by step on this {device_type} (slower): scans/gpn.py needs Triton on a GPU, "
              'and a C compiler on a CPU (cc, or set CC)', file=sys.stderr)
    return False


# ---- weights: norms folded in, one product for everything that reads the same vector ----

class Sizes(NamedTuple):
    """Sizes that the scan needs from a Config."""

    n_embd: int
    n_ffn: int
    n_head: int
    d_k: int
    d_v: int
    n_layer: int
    segment_len: int
    bptt_len: int  # 2**30 if gradients are never cut

    @classmethod
    def from_config(cls, config):
        return cls(*(getattr(config, name) for name in cls._fields[:-1]), config.bptt_len or 2 ** 30)

    def segments(self, T):
        """Return [(start, end)] of the segments; the backward recomputes M for one at a time."""
        starts = sorted({*range(0, T, self.segment_len), *range(0, T, self.bptt_len)})
        return list(zip(starts, [*starts[1:], T]))

    def length_eps(self, norm_eps):
        """Return `l2_normalize`'s eps for states and memory reads, equivalent to RMSNorm's."""
        return (self.n_embd * norm_eps) ** 0.5, (self.n_head * self.d_v * norm_eps) ** 0.5

    def columns(self, layer):
        """Return the widths of the three parts of a layer's input product.

        gate C | query HK, first layer: key HK, value HD, beta H, decay H | SiLU inputs F + HD, up F
        """
        writes = self.n_head * (self.d_k + self.d_v + 2) if layer == 0 else 0
        return [self.n_embd, self.n_head * self.d_k + writes, 2 * self.n_ffn + self.n_head * self.d_v]

    def saved_widths(self):
        """Return the widths of the saved products: ground gate; per layer, input product, read."""
        read = [self.n_head * self.d_v] if self.n_head else []
        return sum(([sum(self.columns(layer)), *read] for layer in range(self.n_layer)), [self.n_embd])


def fold(model):
    """Return a GPN's weights as a flat list, with the norms' weights folded in.

    Ground gate's weight and bias; per layer, weight and bias of the input product (in the order of
    `Sizes.columns`) and weight of the output product; decay rates (H,); key of a zero state (H, K).
    """
    c, write = model.config, model.write
    root = c.n_embd ** 0.5  # RMSNorm is `l2_normalize` times this and its weight

    def folded(linear, norm):
        return linear.weight * (norm.weight * root)

    weights = [folded(model.ground_gate, model.ground_norm), model.ground_gate.bias]
    for i, layer in enumerate(model.layers):
        gate, up = folded(layer.gate_up, layer.ffn_norm).chunk(2)
        w_in, b_in, w_out = [folded(layer.gate, layer.gate_norm)], [layer.gate.bias], layer.ffn_out.weight
        if write is not None:
            w_in.append(folded(layer.query, layer.read_norm))
            b_in.append(layer.query.bias)
            gate = torch.cat([gate, folded(layer.read_gate, layer.read_norm)])
            read_weight = layer.out_norm.weight * len(layer.out_norm.weight) ** 0.5
            w_out = torch.cat([w_out, layer.read_out.weight * read_weight], 1)
        if write is not None and i == 0:
            w_in += [folded(linear, write.norm) for linear in (write.key, write.value, write.beta, write.decay)]
            no_bias = write.dt_bias.new_zeros(write.value.out_features + write.beta.out_features)
            b_in += [write.key.bias, no_bias, write.dt_bias]
        b_in.append(up.new_zeros(len(gate) + len(up)))
        weights += [torch.cat([*w_in, gate, up]), torch.cat(b_in), w_out]
    if write is None:
        return [*weights, up.new_zeros(0), up.new_zeros(0, c.d_k)]
    return [*weights, write.log_rate.exp(), key_of(write.key.bias, c.n_head)[0]]


def l2_normalize(x, eps):
    """Return x / sqrt(|x|^2 + eps^2) over the last axis, and the divisor."""
    length = (x.square().sum(-1, keepdim=True) + eps ** 2).sqrt()
    return x / length, length


def key_of(z, n_head):
    """Return a key or query (..., H, K) from its projection z (..., HK), eq. 8, and its norm."""
    return l2_normalize(F.relu(z.unflatten(-1, (n_head, -1))), KEY_EPS)


# ---- operations between the products of a step, one Triton kernel each ----
#
# A program computes a row, or one head of a row, in fp32 (float64 for float64 inputs); products z
# may be narrower. carry: (N, 1), 0 in rows where a document starts, else 1; None: all ones.


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


@jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    more = 1 + small
    log1p = tl.where(more == 1, small, tl.log(more) * small / (more - 1))  # log(1 + small), accurate near 0
    return tl.maximum(x, 0) + log1p


@jit
def _gated_add_norm_kernel(x, z, add, y, direction, carry, C, z_stride, eps: constexpr, BLOCK: constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place, seen = row * C + i, i < C
    gated = tl.sigmoid(_load(z, row * z_stride + i, seen)) * _load(x, place, seen)
    if carry is not None:
        gated *= tl.load(carry + row)
    out = _load(add, place, seen) + gated
    tl.store(y + place, out, mask=seen)
    tl.store(direction + place, out / tl.sqrt(tl.sum(out * out, 0) + eps * eps), mask=seen)


def gated_add_norm(z, x, add, eps, dtype, carry=None):
    """Return y = sigmoid(z) carry x + add (eq. 4, 7, 11), and `l2_normalize`(y) in dtype.

    x: (N, C), fp32 or float64; z, add: (N, C); z may be columns of a wider product.
    """
    y, direction, C = torch.empty_like(x), torch.empty_like(x, dtype=dtype), x.shape[1]
    _launch(_gated_add_norm_kernel, (len(x),), 8, x, z, add.contiguous(), y, direction, carry, C, z.stride(0),
            eps, _power_of_2(C))
    return y, direction


@jit
def _gated_add_norm_backward_kernel(out, grad, direction, inverse, grad_y, gate, carry, C, BLOCK: constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place, seen = row * C + i, i < C
    g, n = _load(grad, place, seen), _load(direction, place, seen)
    g = (g - n * tl.sum(g * n, 0)) * tl.load(inverse + row) + _load(grad_y, place, seen) * _load(gate, place, seen)
    if carry is not None:
        g *= tl.load(carry + row)
    tl.store(out + place, g, mask=seen)


def gated_add_norm_backward(grad, direction, inverse, grad_y, gate, carry=None):
    """Return carry times the gradient of x (N, C), from those of `l2_normalize`(x) and gate x.

    grad: gradient of direction = `l2_normalize`(x); grad_y: of gate x; inverse: 1 / length of x.
    """
    out, C = torch.empty_like(grad_y), grad_y.shape[1]
    _launch(_gated_add_norm_backward_kernel, (len(out),), 8, out, grad, direction, inverse, grad_y, gate, carry, C,
            _power_of_2(C))
    return out


@jit
def _glu_kernel(z, memory_read, y, Y, N, z_stride, eps: constexpr, FFN: constexpr, READ: constexpr):
    """See `glu`. The last N of the Y columns are for the memory read."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, FFN)
    z, y, seen = z + row * z_stride, y + row * Y, i < Y - N
    z1 = _load(z, i, seen)
    tl.store(y + i, z1 * tl.sigmoid(z1) * _load(z, Y + i, seen), mask=seen)
    if memory_read is not None:
        j = tl.arange(0, READ)
        read = _load(memory_read, row * N + j, j < N)
        z1 = _load(z, Y - N + j, j < N)
        direction = read / tl.sqrt(tl.sum(read * read, 0) + eps * eps)
        tl.store(y + Y - N + j, z1 * tl.sigmoid(z1) * direction, mask=j < N)


def glu(z, memory_read, eps, dtype):
    """Return silu(z1) * (z2, `l2_normalize`(memory_read)) in dtype: eq. 5's FFN and eq. 11's gate.

    z: (N, Y + F) is z1 (N, Y) and z2 (N, F); memory_read: (N, Y - F), or None if Y = F.
    """
    n = 0 if memory_read is None else memory_read.shape[1]
    Y = (z.shape[1] + n) // 2
    y = z.new_empty(len(z), Y, dtype=dtype)
    _launch(_glu_kernel, (len(z),), 8, z, memory_read, y, Y, n, z.stride(0), eps, _power_of_2(Y - n), _power_of_2(n))
    return y


@jit
def _glu_backward_kernel(z, memory_read, grad, out, y, grad_read, Y, N, z_stride, out_stride, eps: constexpr,
                         FFN: constexpr, READ: constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, FFN)
    z, grad, out, y, seen = z + row * z_stride, grad + row * Y, out + row * out_stride, y + row * Y, i < Y - N
    z1, other, g = _load(z, i, seen), _load(z, Y + i, seen), _load(grad, i, seen)
    sigmoid = tl.sigmoid(z1)
    tl.store(y + i, sigmoid * z1 * other, mask=seen)
    tl.store(out + i, g * other * sigmoid * (1 + z1 * (1 - sigmoid)), mask=seen)
    tl.store(out + Y + i, g * sigmoid * z1, mask=seen)
    if memory_read is not None:
        j = tl.arange(0, READ)
        seen = j < N
        read, z1, g = _load(memory_read, row * N + j, seen), _load(z, Y - N + j, seen), _load(grad, Y - N + j, seen)
        inverse, sigmoid = 1 / tl.sqrt(tl.sum(read * read, 0) + eps * eps), tl.sigmoid(z1)
        direction = read * inverse
        tl.store(y + Y - N + j, sigmoid * z1 * direction, mask=seen)
        tl.store(out + Y - N + j, g * direction * sigmoid * (1 + z1 * (1 - sigmoid)), mask=seen)
        g *= sigmoid * z1
        tl.store(grad_read + row * N + j, (g - direction * tl.sum(g * direction, 0)) * inverse, mask=seen)


def glu_backward(grad, z, memory_read, eps, out, y):
    """Return memory_read's gradient; write z's to out and `glu`'s result to y. grad: (N, Y)."""
    n = 0 if memory_read is None else memory_read.shape[1]
    Y = (z.shape[1] + n) // 2
    wide = torch.promote_types(z.dtype, torch.float32)
    grad_read = None if memory_read is None else torch.empty_like(memory_read, dtype=wide)
    _launch(_glu_backward_kernel, (len(z),), 8, z, memory_read, grad, out, y, grad_read, Y, n, z.stride(0),
            out.stride(0), eps, _power_of_2(Y - n), _power_of_2(n))
    return grad_read


@jit
def _normalized_key(z, i, seen, eps: constexpr):
    """Return a row's key or query, the mask of its ReLU, and 1 / its length."""
    x = _load(z, i, seen)
    x = tl.where(x < 0, 0.0, x)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) + eps * eps)
    return x * inverse, x > 0, inverse


@jit
def _memory_inputs_kernel(z, rate, q, k, v, decay, beta, H, z_stride, eps: constexpr, K: constexpr, D: constexpr,
                          ROWS: constexpr, COLUMNS: constexpr):
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, place = z + row * z_stride, row * H + head
    key, _, _ = _normalized_key(z + head * K, i, i < K, eps)
    tl.store(q + place * K + i, key, mask=i < K)
    if rate is not None:
        key, _, _ = _normalized_key(z + (H + head) * K, i, i < K, eps)
        tl.store(k + place * K + i, key, mask=i < K)
        z += 2 * H * K
        tl.store(v + place * D + j, _load(z + head * D, j, j < D), mask=j < D)
        z += H * D + head
        tl.store(beta + place, tl.sigmoid(_wide(tl.load(z))))
        tl.store(decay + place, tl.exp(-tl.load(rate + head) * _softplus(_wide(tl.load(z + H)))))


def memory_inputs(z, rate, n_head, d_k):
    """Return the memory's inputs (eq. 8, 9): q, k (N, H, K), v (N, H, D), decay, beta (N, H).

    z has columns query HK, key HK, value HD, beta H, decay H. If rate (H,) is None, z has only the
    query, and the other results are None.
    """
    d_v = 0 if rate is None else z.shape[1] // n_head - 2 * d_k - 2
    shapes = [(d_k,), (d_k,), (d_v,), (), ()] if d_v else [(d_k,)]
    wide = torch.promote_types(z.dtype, torch.float32)
    outputs = [z.new_empty(len(z), n_head, *shape, dtype=wide) for shape in shapes]
    outputs += [None] * (5 - len(outputs))
    _launch(_memory_inputs_kernel, (len(z), n_head), 1, z, rate, *outputs, n_head, z.stride(0), KEY_EPS, d_k, d_v,
            _power_of_2(d_k), _power_of_2(d_v))
    return outputs


@jit
def _memory_inputs_backward_kernel(z, rate, grad_q, grad_k, grad_v, grad_beta, grad_log, next_carry, out, grad_rate, H,
                                   z_stride, out_stride, eps: constexpr, K: constexpr, D: constexpr, ROWS: constexpr,
                                   COLUMNS: constexpr):
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, out, place, seen = z + row * z_stride, out + row * out_stride, row * H + head, i < K
    key, passed, inverse = _normalized_key(z + head * K, i, seen, eps)
    g = _load(grad_q, place * K + i, seen)
    tl.store(out + head * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
    if rate is not None:
        key, passed, inverse = _normalized_key(z + (H + head) * K, i, seen, eps)
        g = _load(grad_k, place * K + i, seen)
        if next_carry is not None:
            g *= tl.load(next_carry + row)
        tl.store(out + (H + head) * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
        tl.store(out + 2 * H * K + head * D + j, _load(grad_v, place * D + j, j < D), mask=j < D)
        beta_column = 2 * H * K + H * D + head
        decay_column = beta_column + H
        beta, log = tl.sigmoid(_wide(tl.load(z + beta_column))), tl.load(grad_log + place)
        a = _wide(tl.load(z + decay_column))
        tl.store(out + beta_column, tl.load(grad_beta + place) * beta * (1 - beta))
        tl.store(out + decay_column, -log * tl.load(rate + head) * tl.sigmoid(a))
        tl.store(grad_rate + place, -log * _softplus(a))


def memory_inputs_backward(z, rate, out, grads, grad_rate=None, next_carry=None):
    """Write z's gradient to out and, if rate is given, each row's rate gradient to grad_rate.

    grads: of q, k, v, beta and log(decay) from `memory_inputs`; without rate, of q only. The
    gradient of k is multiplied by next_carry.
    """
    (_, n_head, d_k), d_v = grads[0].shape, 0 if rate is None else grads[2].shape[-1]
    _launch(_memory_inputs_backward_kernel, (len(z), n_head), 1, z, rate, *grads, *[None] * (5 - len(grads)),
            next_carry, out, grad_rate, n_head, z.stride(0), out.stride(0), KEY_EPS, d_k, d_v, _power_of_2(d_k),
            _power_of_2(d_v))


# The gated delta rule, eq. 10:  error = v - M^T k   M' = decay M + beta k error^T   read = M'^T q
#
# Columns of M (value dimensions) are independent. A program computes DELTA_COLUMNS of them, with
# all rows of one head, and a step is one pass over M.

DELTA_COLUMNS, DELTA_WARPS = 32, 4


@jit
def _delta_kernel(memory, out, k, v, decay, beta, q, read, carry, first_key, BH, H, D, S: constexpr, K: constexpr,
                  ROWS: constexpr, N: constexpr):
    """Run S steps. memory: (BH, K, D); out: (S, BH, K, D); the others: (S, BH, ...)."""
    head, row, column = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.program_id(1) * N + tl.arange(0, N)
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


def _delta(S, memory, out, *others):
    """Launch `_delta_kernel`. others: its arguments from k to first_key."""
    B, H, K, D = memory.shape
    inputs = (x if x is None else x.contiguous() for x in others)
    _launch(_delta_kernel, (B * H, triton.cdiv(D, DELTA_COLUMNS)), DELTA_WARPS, memory, out, *inputs, B * H, H, D, S, K,
            _power_of_2(K), DELTA_COLUMNS)


def delta_step(memory, out, write, q, carry=None, first_key=None):
    """Apply one write to memory (B, H, K, D), store it in out, return what q reads (B, H, D).

    write: k (B, H, K), v (B, H, D), decay and beta (B, H); q: (B, H, K). Where carry (B, 1) is 0,
    the memory is emptied first, and the key is first_key (H, K).
    """
    read = torch.empty_like(write[1])
    _delta(1, memory, out, *write, q, read, carry, first_key)
    return read


def delta_replay(memory, write, carry=None):
    """Recompute the memories (S + 1, B, H, K, D) before and after S steps, starting with `memory`.

    write, carry: as for `delta_step`, with a leading axis S; k already has first_key filled in.
    """
    S = len(write[0])
    memories = memory.new_empty(S + 1, *memory.shape)
    memories[0] = memory
    _delta(S, memory, memories[1:], *write, None, None, carry, None)
    return memories


@jit
def _delta_backward_kernel(grad, memory, k, v, decay, beta, q, grad_read, carry, shares, grad_v, scalars, BH, H, D,
                           K: constexpr, ROWS: constexpr, N: constexpr):
    """Backward of one step: updates grad (BH, K, D), the memory's gradient, and writes the others.

    Per tile: shares (tiles, 2, BH, K) of q and k, scalars (tiles, 2, BH) of beta and log(decay).
    """
    head, tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS)
    column = tile * N + tl.arange(0, N)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = head * K * D + row[:, None] * D + column[None, :]
    m = tl.load(memory + place, mask=seen, other=0.0)
    if carry is not None:
        m *= tl.load(carry + head // H)
    key = tl.load(k + head * K + row, mask=row < K, other=0.0)
    query = tl.load(q + head * K + row, mask=row < K, other=0.0)
    gr = tl.load(grad_read + head * D + column, mask=column < D, other=0.0)
    g = tl.load(grad + place, mask=seen, other=0.0) + query[:, None] * gr[None, :]
    a, b = tl.load(decay + head), tl.load(beta + head)
    error = tl.load(v + head * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
    gv = tl.sum(g * key[:, None], 0) * b
    to_key = tl.sum(g * error[None, :], 1)
    gq = a * tl.sum(m * gr[None, :], 1) + b * key * tl.sum(error * gr, 0)
    gk = b * to_key - tl.sum(m * gv[None, :], 1)
    tl.store(shares + (tile * 2 * BH + head) * K + row, gq, mask=row < K)
    tl.store(shares + (tile * 2 * BH + BH + head) * K + row, gk, mask=row < K)
    tl.store(scalars + tile * 2 * BH + head, tl.sum(key * to_key, 0))
    tl.store(scalars + tile * 2 * BH + BH + head, a * tl.sum(tl.sum(g * m, 1), 0))
    tl.store(grad_v + head * D + column, gv, mask=column < D)
    g = a * g - key[:, None] * gv[None, :]
    if carry is not None:
        g *= tl.load(carry + head // H)
    tl.store(grad + place, g, mask=seen)


def delta_step_backward(grad, memory, write, q, grad_read, carry=None):
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


# ---- steps on a GPU ----

def unbind_steps(tensors):
    """Turn {name: (S, ...)} into S namespaces; one unbind is faster than indexing each step."""
    return [SimpleNamespace(**dict(zip(tensors, row))) for row in zip(*(x.unbind() for x in tensors.values()))]


class KernelSteps:
    """Steps of a segment on a GPU, with the weights from `fold`; matmuls run in dtype.

    `load` copies new weights in place, so captured CUDA graphs use them.
    """

    def __init__(self, folded, sizes, norm_eps, dtype):
        n, wide = 2 + 3 * sizes.n_layer, torch.promote_types(dtype, torch.float32)
        self.sizes, self.dtype, self.graphs = sizes, dtype, {}
        self.state_eps, self.read_eps = sizes.length_eps(norm_eps)
        with torch.inference_mode(False):
            self.tensors = [torch.empty_like(x, dtype=dtype if i < n else wide) for i, x in enumerate(folded)]
        self.ground, self.layers = self.tensors[:2], [self.tensors[i:i + 3] for i in range(2, n, 3)]
        self.rate, self.first_key = self.tensors[n:]
        self.load(folded)

    @torch.no_grad()
    def load(self, folded):
        for own, x in zip(self.tensors, folded):
            own.copy_(x)
        return self

    def step(self, s, direction, k, memory, memory_after, u, carry=None, active=None):
        """Compute `Model.step`, given the previous key instead of the previous grounded state.

        s, u: (B, C); direction: `l2_normalize`(s); k: (B, H, K); memory: (B, H, K, D); the new one
        is stored in memory_after; carry: (B, 1), 0 where a document starts; active: (B, 1), False
        where the memory is kept. Returns s, direction, k; for the backward, states and products.
        """
        H, K = self.sizes.n_head, self.sizes.d_k
        z = F.linear(direction, *self.ground)
        states, products, next_k, memory_read = [], [z], k, None
        x, direction = gated_add_norm(z, s, u, self.state_eps, self.dtype, carry)  # eq. 4
        for i, (w_in, b_in, w_out) in enumerate(self.layers):
            z = F.linear(direction, w_in, b_in)
            products.append(z)
            gate_in, memory_in, glu_in = z.split(self.sizes.columns(i), -1)
            if H and i == 0:
                q, next_k, v, decay, beta = memory_inputs(memory_in, self.rate, H, K)  # eq. 8, 9
                if active is not None:
                    decay, beta = torch.where(active, decay, 1.0), beta * active
                write = k, v, decay, beta
                memory_read = delta_step(memory, memory_after, write, q, carry, self.first_key)  # eq. 10
            elif H:
                memory_read = read_heads(memory_after, memory_inputs(memory_in, None, H, K)[0])
            if H:
                memory_read = memory_read.flatten(1)
                products.append(memory_read)
            y = glu(glu_in, memory_read, self.read_eps, self.dtype)
            x, direction = gated_add_norm(gate_in, x, F.linear(y, w_out), self.state_eps, self.dtype)  # eq. 7, 11
            states.append(x)
        return x, direction, next_k, states, products

    def steps(self, s, k, memory, u, carry=None, active=None):
        """Run S steps. u: (S, B, C); carry: (S, B, 1) in u's dtype; active: (S, B, 1) bool.

        s (1, B, C), k (1, B, H, K), memory (1, B, H, K, D) are updated in place, or with S + 1
        entries, from entry t to t + 1. Returns them, the layers' states and products (S, B, ...).
        """
        if active is not None and carry is not None:
            carry = torch.where(active, carry, 1.0)
        state, key, direction, outputs = s[0], k[0], None, []
        for t in range(len(u)):
            if direction is None:
                direction = l2_normalize(state, self.state_eps)[0].to(self.dtype)
            start, end = (t, t + 1) if len(s) > 1 else (0, 0)
            carry_t, active_t = (x if x is None else x[t] for x in (carry, active))
            after, direction, after_key, states, products = self.step(state, direction, key, memory[start], memory[end],
                                                                      u[t], carry_t, active_t)
            if active is not None:
                after = torch.where(active_t, after, state)
                after_key, direction = torch.where(active_t.unsqueeze(-1), after_key, key), None
            state, key = after, after_key
            if end == t + 1 or t + 1 == len(u):
                s[end], k[end] = state, key
            outputs.append((*states, *products))
        if len(u) == 1:  # avoid copies in decoding
            return s, k, memory, [x.unsqueeze(0) for x in outputs[0]]
        return s, k, memory, [torch.stack(x) for x in zip(*outputs)]

    def backward(self, u, carry, start, grads, saved, is_cut):
        """Compute the gradients of `steps`.

        start: state before each step (S, B, C), key (B, H, K) and memory before the first step
        grads: gradients of the predicted states (S, B, C), last state, next key and memory
        saved: results of `steps`, without the last layer's states
        is_cut: truncated BPTT ends here: the next key's gradient goes to the key's weights only

        Returns the gradients of u, the first state, key and memory, the decay rates and the zero
        state's key; and for each weight, a pair of matrices whose product is its gradient.
        """
        (S, _, C), (grad, ds, dk, dm), (L, H) = u.shape, grads, (self.sizes.n_layer, self.sizes.n_head)
        ground, layers = self.recompute(u, carry, start, saved)
        ground_steps, layer_steps = unbind_steps(ground), [unbind_steps(layer) for layer in layers]
        dx, du, dks = [[] for _ in range(L)], [], []
        carries = [None] * (S + 1) if carry is None else [*carry, None]  # the incoming dk has its carry applied
        for t in reversed(range(S)):
            d = ds + grad[t]
            for i in reversed(range(L)):
                at, (w_in, _, w_out) = layer_steps[i][t], self.layers[i]
                dx[i].append(d)
                torch.mul(d, at.slope, out=at.d_gate_in)  # eq. 7
                dread = glu_backward(d.to(self.dtype) @ w_out, at.glu_in, at.memory_read if H else None, self.read_eps,
                                     at.d_glu_in, at.y)
                dz = at.dz
                if H and i == 0:
                    dk = self.write_backward(at, dread, dk, dm, carries[t], carries[t + 1])
                    dks.append(dk)
                    if is_cut and t == S - 1:  # no gradient through the columns of the next key
                        dz = dz.clone()
                        dz[:, C + self.sizes.d_k * H:C + 2 * self.sizes.d_k * H] = 0
                elif H:
                    self.read_backward(at, dread, dm)
                d = gated_add_norm_backward(dz @ w_in, at.direction, at.inverse, d, at.gate)
            at = ground_steps[t]
            du.append(d)
            torch.mul(d, at.slope, out=at.dz)  # eq. 4
            ds = gated_add_norm_backward(at.dz @ self.ground[0], at.direction, at.inverse, d, at.gate, carries[t])

        def stack(last_first):
            return torch.stack(last_first[::-1])

        drate = layers[0]['drate'].sum((0, 1)) if H else self.rate.new_zeros(0)
        dfirst = torch.zeros_like(self.first_key)
        if H and carry is not None:
            dfirst, dk = (stack(dks) * (1 - carry.unsqueeze(-1))).sum((0, 1)), dk * carry[0].unsqueeze(-1)
        pairs = [(ground['dz'], ground['direction'])]
        for i, layer in enumerate(layers):
            pairs += [(layer['dz'], layer['direction']), (stack(dx[i]), layer['y'])]
        return stack(du), ds, dk, dm, drate, dfirst, pairs

    def recompute(self, u, carry, start, saved):
        """Compute, for all steps at once, the values that `backward` needs.

        Returns {name: (S, B, ...)} of the ground gate and of each layer; dz is room for gradients.
        """
        (s, k, memory), (S, B, _), (H, K) = start, u.shape, (self.sizes.n_head, self.sizes.d_k)
        states, products = saved[:self.sizes.n_layer - 1], iter(saved[self.sizes.n_layer - 1:])
        s = s if carry is None else s * carry
        ground, layers = self.gated(s, next(products)), []
        for i, x in enumerate([torch.addcmul(u, ground['gate'], s), *states]):
            z, widths = next(products), self.sizes.columns(i)
            layer = self.gated(x, z)
            layer |= dict(zip(('gate_in', 'memory_in', 'glu_in'), z.split(widths, -1)))
            layer |= dict(zip(('d_gate_in', 'd_memory_in', 'd_glu_in'), layer['dz'].split(widths, -1)))
            layer['y'] = u.new_empty(S, B, self.sizes.n_ffn + H * self.sizes.d_v, dtype=self.dtype)
            if H:
                found = memory_inputs(layer['memory_in'].flatten(0, 1), None if i else self.rate, H, K)
                q, next_k, v, decay, beta = (x if x is None else x.unflatten(0, (S, B)) for x in found)
                layer |= dict(q=q, memory_read=next(products))
            if H and i == 0:
                k = torch.cat([k.unsqueeze(0), next_k[:-1]])
                k = k if carry is None else torch.where(carry.unsqueeze(-1) > 0, k, self.first_key)
                memories = delta_replay(memory, (k, v, decay, beta), carry)
                layer |= dict(k=k, v=v, decay=decay, beta=beta, drate=u.new_empty(S, B, H))
            if H:  # only the first layer writes
                layer['memory'] = memories[1:] if i else memories[:-1]
            layers.append(layer)
        return ground, layers

    def gated(self, x, z):
        """Return what the backward of a gate and x's norm needs; dz is room for z's gradient."""
        (direction, length), gate = l2_normalize(x, self.state_eps), torch.sigmoid(z[..., :x.shape[-1]].to(x.dtype))
        return dict(direction=direction, inverse=1 / length, gate=gate, slope=x * gate * (1 - gate),
                    dz=torch.empty_like(z))

    def write_backward(self, at, dread, dk, dm, carry, next_carry):
        """Backward of eq. 8 to 10 at one step. Returns the gradient of the key used in the write.

        dread: gradient of the memory read; dk: of the key for the next step; dm: of the memory
        after the step, updated in place to that of the memory before.
        """
        write, dread = (at.k, at.v, at.decay, at.beta), dread.view_as(at.v)
        dq, dk_used, *others = delta_step_backward(dm, at.memory, write, at.q, dread, carry)
        memory_inputs_backward(at.memory_in, self.rate, at.d_memory_in, (dq, dk, *others), at.drate, next_carry)
        return dk_used

    def read_backward(self, at, dread, dm):
        """Backward of a read above the first layer. Adds the memory's gradient to dm."""
        dread = dread.view(*at.q.shape[:2], -1)
        dq = read_heads(at.memory.transpose(-1, -2), dread)
        dm.addcmul_(at.q.unsqueeze(-1), dread.unsqueeze(-2))
        memory_inputs_backward(at.memory_in, None, at.d_memory_in, (dq,))


def read_heads(memory, x):
    """Return memory^T x per head: memory (B, H, n, p), x (B, H, n) -> (B, H, p)."""
    return torch.bmm(x.reshape(-1, 1, x.shape[-1]), memory.flatten(0, 1)).view(*x.shape[:2], -1)


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


# ---- steps in C, on a CPU ----
#
# One layer's step is three small matmuls and many small loops. As PyTorch operators, they take
# longer to launch than to run. On CPUs with bf16 units, matmul inputs can be bf16.

LIBRARY_DIR = Path(__file__).with_name('__pycache__')  # compiled libraries


@functools.cache
def _build(dtype):
    """Compile gpn.c for this machine and dtype, or return None (no C compiler or bf16 units)."""
    command = [*shlex.split(os.environ.get('CC', 'cc')), '-O3', '-march=native', '-fno-math-errno', '-fno-signed-zeros',
               '-fno-trapping-math', '-fassociative-math', '-shared', '-fPIC']
    command += {torch.float64: ['-DDOUBLE'], torch.bfloat16: ['-DBF16']}.get(dtype, [])
    library = _library([*command, '-fopenmp']) or _library(command)  # with OpenMP if available
    if library is not None:
        real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
        fields = [(name, ctypes.c_long) for name in (*'SBCFHKDL', 'threads', 'keep')]
        fields += [(name, real) for name in ('state_eps', 'read_eps', 'key_eps')]
        library.sizes = type('sizes', (ctypes.Structure,), {'_fields_': fields})
    return library


def _library(command):
    """Compile gpn.c (1 to 2 s), or load it from LIBRARY_DIR, keyed by a hash of its inputs."""
    source = Path(__file__).with_name('gpn.c')
    try:
        # predefined macros include the compiler's version and this CPU's features
        macros = subprocess.run([*command, '-dM', '-E', '-x', 'c', os.devnull], capture_output=True, check=True).stdout
        name = f'gpn-{hashlib.sha256(repr([source.read_bytes(), command, macros]).encode()).hexdigest()}.so'
        with suppress(OSError):  # missing or damaged
            return ctypes.CDLL(LIBRARY_DIR / name)
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, name)
            subprocess.run([*command, source, '-o', built, '-lm'], capture_output=True, check=True)
            library = ctypes.CDLL(built)
            with suppress(OSError):  # the folder is not writable
                LIBRARY_DIR.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory(dir=LIBRARY_DIR) as beside:
                    os.replace(shutil.copy(built, beside), LIBRARY_DIR / name)
            return library
    except (OSError, subprocess.CalledProcessError):
        return None


def pointers(x):
    """Convert a tensor, None, an int, or a list of them to a ctypes argument."""
    if isinstance(x, list):
        return (ctypes.c_void_p * len(x))(*map(pointers, x))
    return ctypes.c_long(x) if isinstance(x, int) else ctypes.c_void_p(None if x is None else x.data_ptr())


class CSteps:
    """`KernelSteps` on a CPU: a segment is one call of gpn.c. backward: only for `backward`."""

    def __init__(self, folded, sizes, norm_eps, dtype, backward=False):
        self.library, self.sizes = _build(dtype), sizes
        products, wide = [x.detach() for x in folded[:-2]], torch.promote_types(dtype, torch.float32)
        self.rate, self.first_key = (x.detach().to(wide) for x in folded[-2:])
        if backward:
            products = [w.T if w.dim() == 2 else None for w in products]  # gradients need W^T and no bias
        panels = [w if w is None else w.to(wide).contiguous() if w.dim() == 1 else self._panels(w.to(dtype))
                  for w in products]
        self.weights = [*panels, self.rate, self.first_key]  # keeps them alive: C has only their addresses
        self.pointers = pointers(self.weights)
        self.numbers = self.library.sizes(0, 0, *sizes[:6], 0, 0, *sizes.length_eps(norm_eps), KEY_EPS)

    def _panels(self, weight):
        """Zero-pad weight (n, c) and return its tiles: (n / width, c / pair, width, pair)."""
        width, pair = (ctypes.c_int.in_dll(self.library, name).value for name in ('panel', 'pair'))
        whole = F.pad(weight, (0, -weight.shape[1] % pair, 0, -len(weight) % width))
        return whole.unflatten(0, (-1, width)).unflatten(2, (-1, pair)).transpose(1, 2).contiguous()

    def _call(self, function, u, *arguments):
        assert u.dtype == self.rate.dtype, f'{u.dtype} with weights of {self.rate.dtype}'
        self.numbers.S, self.numbers.B, self.numbers.threads = *u.shape[:2], torch.get_num_threads()
        function(ctypes.byref(self.numbers), self.pointers, *map(pointers, arguments))

    def steps(self, s, k, memory, u, carry=None, active=None):
        u, carry, active = (x if x is None else x.contiguous() for x in (u, carry, active))
        self.numbers.keep = len(s) > 1
        widths = [self.sizes.n_embd] * self.sizes.n_layer + self.sizes.saved_widths()
        outputs = [u.new_empty(*u.shape[:2], width) for width in widths]
        self._call(self.library.steps, u, s, k, memory, u, carry, active, outputs)
        return s, k, memory, outputs

    def backward(self, u, carry, start, grads, saved, is_cut):
        (S, B, _), c, (grad, *later) = u.shape, self.sizes, grads
        du, (ds, dk, dm) = torch.empty_like(u), (x.clone() for x in later)
        inner, products = saved[:c.n_layer - 1], saved[c.n_layer - 1:]
        saved = [x.contiguous() for x in (*inner, u, *products)]  # u: placeholder for the last states, not read
        drate, dfirst, memories = u.new_zeros(B, c.n_head), torch.zeros_like(dk), u.new_empty(S, *dm.shape)
        widths = [c.n_embd, c.n_embd]
        for layer in range(c.n_layer):
            widths += [sum(c.columns(layer)), c.n_embd, c.n_embd, c.n_ffn + c.n_head * c.d_v]
        pairs = [u.new_empty(S, B, width) for width in widths]
        inputs = [x if x is None else x.contiguous() for x in (u, carry, *start, grad)]
        self._call(self.library.steps_backward, u, int(is_cut), *inputs, ds, dk, dm, saved, memories, du, drate, dfirst,
                   pairs)
        return du, ds, dk, dm, drate.sum(0), dfirst.sum(0), list(zip(pairs[::2], pairs[1::2]))


# ---- the operator over a window: a custom op, so that the compiler sees no loop ----

def uses_c(device):
    return device.type == 'cpu' and not scans.KERNELS_ON_CPU


@functools.cache
def _kernels_of(folded_shapes, sizes, norm_eps, dtype, device):
    return KernelSteps([torch.empty(shape, device=device) for shape in folded_shapes], sizes, norm_eps, dtype)


def get_steps(folded, sizes, norm_eps, dtype, backward=False):
    """Return the steps with these weights. On a GPU, objects are reused: they hold CUDA graphs."""
    if uses_c(folded[0].device):
        return CSteps(folded, sizes, norm_eps, dtype, backward)
    shapes = tuple(x.shape for x in folded)
    return _kernels_of(shapes, sizes, norm_eps, dtype, folded[0].device).load(folded)


def uses_graphs(device):
    """Return True on a GPU: the kernels of a segment are too small to be launched one by one."""
    return device.type == 'cuda'


def run_segment(w, function, inputs, is_usual):
    """Call a method of w; on a GPU, as a CUDA graph if the segment has the usual length."""
    if not is_usual or not uses_graphs(w.first_key.device):
        return function(*inputs)
    key = function.__name__, *(getattr(x, 'shape', x) for x in tree_leaves(inputs))
    if key not in w.graphs:
        with torch.inference_mode(False), torch.no_grad():  # training can reuse evaluation's graph
            w.graphs[key] = Graph(function, inputs)
    return w.graphs[key].replay(inputs)


def scan_forward(u: torch.Tensor, carry: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int],
                 norm_eps: float, dtype: torch.dtype, record: bool) -> list[torch.Tensor]:
    """Return the predicted states (T, B, C) and, if record, what the backward needs.

    u: (T, B, C); carry: (T, B, 1) or None. Recorded: the memory at the start of each segment, the
    states between layers, and the products in dtype.
    """
    T, sizes = len(u), Sizes(*sizes)
    L, usual = sizes.n_layer, min(T, sizes.segment_len, sizes.bptt_len)
    with torch.autocast(u.device.type, enabled=False):
        w = get_steps(folded, sizes, norm_eps, dtype)
        outputs = _empty_outputs(u, sizes, dtype, record)
        out, memories, *saved = outputs
        s, k, memory = torch.zeros_like(u[:1]), w.first_key.repeat(1, u.shape[1], 1, 1), torch.zeros_like(memories[:1])
        for r, (a, b) in enumerate(sizes.segments(T)):
            if record:
                memories[r] = memory[0]
            inputs = s, k, memory, u[a:b], None if carry is None else carry[a:b]
            s, k, memory, step_outputs = run_segment(w, w.steps, inputs, b - a == usual)
            out[a:b] = step_outputs[L - 1]
            for x, part in zip(saved, (*step_outputs[:L - 1], *step_outputs[L:])):  # `saved` is empty without record
                x[a:b] = part
    return outputs


def _empty_outputs(u, sizes, dtype, record):
    """Allocate the results of `scan_forward`."""
    T, B, _ = u.shape
    R = len(sizes.segments(T)) if record else 1
    outputs = [torch.empty_like(u), u.new_empty(R, B, sizes.n_head, sizes.d_k, sizes.d_v)]
    if record:
        outputs += [torch.empty_like(u) for _ in range(sizes.n_layer - 1)]
        saved = u.dtype if uses_c(u.device) else dtype
        outputs += [u.new_empty(T, B, width, dtype=saved) for width in sizes.saved_widths()]
    return outputs


def scan_backward(grad: torch.Tensor, u: torch.Tensor, carry: torch.Tensor | None, folded: list[torch.Tensor],
                  outputs: list[torch.Tensor], sizes: list[int], norm_eps: float,
                  dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of u and the folded weights. grad: gradient of the predicted states."""
    (T, B, C), sizes, (out, memories, *saved) = u.shape, Sizes(*sizes), outputs
    L, H, K, usual = sizes.n_layer, sizes.n_head, sizes.d_k, min(T, sizes.segment_len, sizes.bptt_len)

    def add_product(total, dout, x):
        dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
        if dtype == total.dtype:
            total.addmm_(dout.T, x)
        else:
            total.add_(dout.T @ x)

    with torch.autocast(u.device.type, enabled=False):
        w, grad_u = get_steps(folded, sizes, norm_eps, dtype, backward=True), torch.empty_like(u)
        totals = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        ds, dk, dm = u.new_zeros(B, C), u.new_zeros(B, H, K), torch.zeros_like(memories[0])
        for (a, b), memory in reversed(list(zip(sizes.segments(T), memories))):
            s = out[a - 1:b - 1] if a else F.pad(out[:b - 1], (0, 0, 0, 0, 1, 0))
            k = w.first_key.repeat(B, 1, 1)
            if a and H:  # the key from the previous step
                k = key_of(saved[L][a - 1, :, C + H * K:C + 2 * H * K].to(u.dtype), H)[0]
            inputs = (u[a:b], None if carry is None else carry[a:b], (s, k, memory), (grad[a:b], ds, dk, dm),
                      [x[a:b] for x in saved], b < T and b % sizes.bptt_len == 0)
            grad_u[a:b], ds, dk, dm, drate, dfirst, pairs = run_segment(w, w.backward, inputs, b - a == usual)
            add_product(totals[0], *pairs[0])
            totals[1] += pairs[0][0].sum((0, 1))
            for i in range(L):
                (dz, direction), (dx, y) = pairs[1 + 2 * i:3 + 2 * i]
                add_product(totals[2 + 3 * i], dz, direction)
                totals[3 + 3 * i] += dz.sum((0, 1))
                add_product(totals[4 + 3 * i], dx, y)
            totals[-2] += drate
            totals[-1] += dfirst if a else dfirst + dk.sum(0)
            if a % sizes.bptt_len == 0:  # the key's gradient still reaches its weights, one step before
                ds, dm = torch.zeros_like(ds), torch.zeros_like(dm)
    return [grad_u, *(total.to(x.dtype) for total, x in zip(totals, folded))]


_scan_op = torch.library.custom_op('gpn::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op('gpn::scan_backward', scan_backward, mutates_args=())


@_scan_op.register_fake
def _(u, carry, folded, sizes, norm_eps, dtype, record):
    return _empty_outputs(u, Sizes(*sizes), dtype, record)


@_scan_backward_op.register_fake
def _(grad, u, carry, folded, *_):
    return [torch.empty_like(x) for x in (u, *folded)]


def _save_for_backward(ctx, inputs, output):
    u, carry, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, carry, *folded, *output)
    ctx.n_folded = len(folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grads):
    u, carry, *tensors = ctx.saved_tensors
    folded, outputs = tensors[:ctx.n_folded], tensors[ctx.n_folded:]
    grad_u, *grad_folded = _scan_backward_op(grads[0].contiguous(), u, carry, folded, outputs, *ctx.numbers)
    return grad_u, None, grad_folded, *[None] * 4


_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def product_dtype(dtype, device):
    """Return the dtype of products: on CPUs, fp32 replaces fp16, and bf16 without bf16 units."""
    return c_dtype(dtype) if uses_c(device) else dtype


@outside_graphs
def c_dtype(dtype):
    return dtype if dtype == torch.float64 or dtype == torch.bfloat16 and _build(dtype) else torch.float32


def scan_window(model, u, carry_mask=None):
    """Compute `Model.loop`: return the states (B, T, C). u: (B, T, C), fp32 or wider."""
    c, dtype, kind = model.config, model.fuse.weight.dtype, u.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:  # autocast ignores float64
        dtype = torch.get_autocast_dtype(kind)
    if carry_mask is not None:
        carry_mask = carry_mask.T.unsqueeze(-1).to(u.dtype, memory_format=torch.contiguous_format)
    return _scan_op(u.transpose(0, 1).contiguous(), carry_mask, fold(model), list(Sizes.from_config(c)), c.norm_eps,
                    product_dtype(dtype, u.device), torch.is_grad_enabled())[0].transpose(0, 1)


# ---- decoding ----

class Decoder:
    """Decoding with weights folded once: `first_state` and `advance` of the model, on s, k, M."""

    @torch.no_grad()
    def __init__(self, model, device):
        c, device = model.config, torch.device(device)
        self.sizes, self.segment_len = Sizes.from_config(c), c.segment_len
        folded = [w.to(device, copy=True) for w in fold(model)]
        make = CSteps if uses_c(device) else KernelSteps
        self.weights = make(folded, self.sizes, c.norm_eps, product_dtype(model.fuse.weight.dtype, device))

    def first_state(self, batch_size, device=None):
        """Return s, k and M at the start of a document."""
        c, k = self.sizes, self.weights.first_key.repeat(batch_size, 1, 1)
        return k.new_zeros(batch_size, c.n_embd), k, k.new_zeros(batch_size, c.n_head, c.d_k, c.d_v)

    def advance(self, state, u, carry_mask=None, active=None):
        """See `Model.advance`."""
        masks, states = [x if x is None else x.unsqueeze(-1) for x in (carry_mask, active)], []
        if carry_mask is not None:
            masks[0] = masks[0].to(u.dtype)
        with torch.autocast(u.device.type, enabled=False):  # autocast would read the memory in bf16
            for a in range(0, u.shape[1], self.segment_len):  # in parts: `steps` holds all products of a part
                b = min(a + self.segment_len, u.shape[1])
                part = [x if x is None else x[:, a:b].transpose(0, 1).contiguous() for x in (u, *masks)]
                places = [x if len(x) == 1 else x[a:b + 1] for x in state]
                states.append(self.weights.steps(*places, *part)[3][self.sizes.n_layer - 1].transpose(0, 1))
        return torch.cat(states, 1)
