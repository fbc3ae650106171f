"""GPN's equations over a window as one operator with its own gradient, and over a cache: `scan_window` and `Decoder`.

The function is that of `Model.step` in model_gpn.py, repeated; what makes it fast:

* The weight of each RMSNorm is folded into the matrix after it (`fold`). What is left of the norm, x / sqrt(|x|^2 +
  eps^2), is the same for all matrices that read x, so that a layer is two products: one in, for gate, query, write and
  feed-forward net together, one out.
* The next token needs no grounded state but only the key made of it: (s, k, M) is carried where the equations carry (s,
  g, M).
* Only the gradients of s, k and M go back through time. Those of the weights are one large product a segment
  (`scan_backward`).
* On CPU a segment of steps is one call of C (gpn.c), on a GPU one CUDA graph of products and small Triton kernels.

Training holds, for R = T / S segments of S = segment_len steps: states L T B C, products T B W of width W = C + L (C +
2F) + H ((L + 1) K + (2L + 1) D + 2), M at the segments' starts R B H K D; and in the backward (S + 1) B H K D for the M
of one segment and a few times S B W for what its steps need. M at every step, T B H K D, is never there.

Letters as in model_gpn.py; N rows, S steps of a segment, R segments. From top to bottom: weights, pieces of a step,
their Triton kernels, steps in C, steps and their gradient in operators, CUDA graphs, the operator over a window,
decoding.
"""
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import attn_kernels
from attn_kernels import constexpr, jit, tl, triton
from scans.delta_rule import delta_replay, delta_step, delta_step_backward, rows_times, use_triton

USE_C = True  # on CPU the steps run in C where there is a compiler
USE_GRAPHS = True  # in training on a GPU a segment is one CUDA graph: its kernels are too small for their launches


# ---- weights: the norms' folded in, one product for all that reads the same vector ----


class Sizes(NamedTuple):
    """What the scan must know of a Config, as numbers."""
    n_embd: int
    n_ffn: int
    n_head: int
    d_k: int
    d_v: int
    n_layer: int

    @classmethod
    def of(cls, config):
        return cls(*(getattr(config, name) for name in cls._fields))

    def columns(self, layer):
        """Widths of the three parts of a layer's product in:

            gate C | query HK, and in the first layer key HK, value HD, beta H, decay H | silu'd F + HD, up F
        """
        writes = self.n_head * (self.d_k + self.d_v + 2) if layer == 0 else 0
        return [self.n_embd, self.n_head * self.d_k + writes, 2 * self.n_ffn + self.n_head * self.d_v]

    def saved_widths(self):
        """Widths of what the backward needs of a step's products: the ground gate's, then of each layer the product in
        and, with a memory, what was read."""
        widths = [self.n_embd]
        for layer in range(self.n_layer):
            widths.append(sum(self.columns(layer)))
            if self.n_head:
                widths.append(self.n_head * self.d_v)
        return widths


def fold(model):
    """The weights of a GPN's steps, the norms' weights in them, as a flat list that `Weights` reads.

    The ground gate's (weight, bias); of each layer one product in (weight, bias) and one out (weight), in the columns
    of `Sizes.columns`; with a memory the decay rates (H,) and the key (H, K) that a zero state gives.
    """
    root = model.config.n_embd ** 0.5  # RMSNorm is `l2_normalize` times this

    def folded(linear, norm):
        return linear.weight * (norm.weight * root)

    write = model.write
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
    if write is not None:
        key = F.relu(write.key.bias).unflatten(-1, (model.config.n_head, -1))
        first_key = key * (key.square().sum(-1, keepdim=True) + model.all_eps[1] ** 2).rsqrt()
        weights += [write.log_rate.exp(), first_key]
    return weights


class Weights:
    """The list of `fold` as products in one dtype. eps: (of norms, of keys), as `Model.all_eps`.

    backward: the products of a gradient with the weights instead.
    """

    graphs = False  # CUDA graphs read these tensors

    def __init__(self, folded, sizes, eps, dtype, backward=False):
        device, wide = folded[0].device, torch.promote_types(folded[0].dtype, torch.float32)
        no_memory = [torch.zeros(0, sizes.d_k, device=device)] * 2
        self.rate, self.first_key = (x.detach().to(wide) for x in (folded[-2:] if sizes.n_head else no_memory))
        norm_eps, self.key_eps = eps
        self.state_eps = (sizes.n_embd * norm_eps) ** 0.5
        self.read_eps = (sizes.n_head * sizes.d_v * norm_eps) ** 0.5
        products = [w.detach() for w in folded[:2 + 3 * sizes.n_layer]]
        if backward:
            products = [w.T if w.dim() == 2 else None for w in products]
        self.sizes, self.dtype, self.in_c = sizes, dtype, None
        if StepsInC.serves(device, dtype):
            all_eps = self.state_eps, self.read_eps, self.key_eps
            self.in_c = StepsInC(products, self.rate, self.first_key, sizes, all_eps, dtype)
            return
        products = [w if w is None else w.to(dtype) if w.dim() == 1 else packed(w.to(dtype)) for w in products]
        self.ground, self.layers = products[:2], [products[i:i + 3] for i in range(2, len(products), 3)]

    def tensors(self):
        products = [*self.ground, *(w for layer in self.layers for w in layer)]
        return [w for w in products if w is not None] + [self.rate, self.first_key]


def packed(weight):
    """The weight in the layout of the CPU's matrix units, where this PyTorch can (private operators): products of few
    rows are bound by reading it, and take half the time. Elsewhere the weight itself."""
    reorder = getattr(torch.ops.mkldnn, '_reorder_linear_weight', None)
    on_cpu = weight.device.type == 'cpu' and torch.backends.mkldnn.is_available()
    if on_cpu and weight.dtype != torch.float64 and reorder is not None:
        try:
            ready = reorder(weight.detach().contiguous())
            product(weight.new_zeros(1, weight.shape[1]), ready)
            return ready
        except RuntimeError:  # this dtype has no such operator here
            pass
    return weight


def product(x, weight, bias=None):
    """x W^T + b for rows x (B, ...), in the weight's dtype."""
    x = x.to(weight.dtype)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')
    return F.linear(x, weight, bias)


# ---- pieces: what is between the products of a step ----
#
# On a GPU each is one Triton kernel, elsewhere PyTorch's operators. Arithmetic is in fp32 at least; products z may be
# of less.


@functools.cache
def _constant(value, device, dtype):
    return torch.full((), value, device=device, dtype=dtype)


def l2_normalize(x, eps):
    """x / sqrt(|x|^2 + eps^2) over the last axis, and what it was divided by. RMSNorm is this but for a constant."""
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _constant(eps, x.device, x.dtype))
    return x / length, length


def l2_normalize_backward(grad, y, inverse):
    """The gradient of x from that of y = `l2_normalize`(x). inverse: 1 / its length; may be 0 where a ReLU cut x."""
    return torch.addcmul(grad, y, (y * grad).sum(-1, keepdim=True), value=-1).mul_(inverse)


def gated_add_norm(z, x, add, eps, dtype):
    """y = sigmoid(z) x + add, and `l2_normalize`(y) in dtype: eq. 4, 7 and 11, and the norm before the next product.

    x (N, C) in fp32 or float64; z and add (N, C), z may be columns of a wider product.
    """
    if use_triton(x):
        C = x.shape[1]
        y, direction = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        _launch(_gated_add_norm_kernel, (len(x),), 8, x, z, add.contiguous(), y, direction, C, z.stride(0), eps,
                triton.next_power_of_2(C))
        return y, direction
    y = torch.addcmul(add.to(x.dtype), torch.sigmoid(z.to(x.dtype)), x)
    return y, l2_normalize(y, eps)[0].to(dtype)


def gated_add_norm_backward(grad, direction, inverse, grad_y, gate_value):
    """The gradient of x (N, C) where direction = `l2_normalize`(x) and gate_value x are used: grad is that of
    direction, grad_y that of gate_value x."""
    if use_triton(grad_y):
        out, C = torch.empty_like(grad_y), grad_y.shape[1]
        _launch(_gated_add_norm_backward_kernel, (len(out),), 8, out, grad, direction, inverse, grad_y, gate_value, C,
                triton.next_power_of_2(C))
        return out
    return torch.addcmul(l2_normalize_backward(grad.to(grad_y.dtype), direction, inverse), grad_y, gate_value)


def glu(z, memory_read, eps, dtype):
    """silu(z1) * (z2, `l2_normalize`(memory_read)) in dtype: the feed-forward net's inside and the gated read, eq. 5
    and 11.

    z (N, Y + F) is z1 (N, Y) and z2 (N, F); memory_read (N, Y - F) in fp32, or None where Y = F.
    """
    n = 0 if memory_read is None else memory_read.shape[1]
    Y = (z.shape[1] + n) // 2
    if use_triton(z):
        y = z.new_empty(len(z), Y, dtype=dtype)
        _launch(_glu_kernel, (len(z),), 8, z, memory_read, y, Y, n, z.stride(0), eps, triton.next_power_of_2(Y - n),
                triton.next_power_of_2(n))
        return y
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    other = z[:, Y:]
    if memory_read is not None:
        other = torch.cat([other, l2_normalize(memory_read, eps)[0]], 1)
    return (F.silu(z[:, :Y]) * other).to(dtype)


def glu_backward(grad, z, memory_read, eps, out, y):
    """From grad (N, Y), of what `glu` gives: the gradient of z into out, `glu` into y; returns memory_read's."""
    n, wide = 0 if memory_read is None else memory_read.shape[1], torch.promote_types(z.dtype, torch.float32)
    Y = (z.shape[1] + n) // 2
    if use_triton(z):
        grad_read = None if memory_read is None else torch.empty_like(memory_read, dtype=wide)
        _launch(_glu_backward_kernel, (len(z),), 8, z, memory_read, grad, out, y, grad_read, Y, n, z.stride(0),
                out.stride(0), eps, triton.next_power_of_2(Y - n), triton.next_power_of_2(n))
        return grad_read
    grad, z1, other = grad.to(wide), z[:, :Y].to(wide), z[:, Y:].to(wide)
    if memory_read is not None:
        direction, length = l2_normalize(memory_read.to(wide), eps)
        other = torch.cat([other, direction], 1)
    sigmoid = torch.sigmoid(z1)
    silu = sigmoid * z1
    torch.mul(silu, other, out=y)
    slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
    torch.mul(grad * other, slope, out=out[:, :Y])
    grad_other = grad * silu
    out[:, Y:] = grad_other[:, :Y - n]
    return None if memory_read is None else l2_normalize_backward(grad_other[:, Y - n:], direction, 1 / length)


def memory_inputs(z, rate, n_head, d_k, eps):
    """What the memory is asked and written with, eq. 8 and 9: q, k (N, H, K), v (N, H, D), decay, beta (N, H).

    z has the columns query HK, key HK, value HD, beta H, decay H. Without a rate (H,) it has the query alone, and the
    others come back as None.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    if use_triton(z):
        d_v = 0 if rate is None else z.shape[1] // n_head - 2 * d_k - 2
        shapes = [(d_k,), (d_k,), (d_v,), (), ()] if d_v else [(d_k,)]
        outputs = [z.new_empty(len(z), n_head, *shape, dtype=wide) for shape in shapes]
        outputs += [None] * (5 - len(outputs))
        _launch(_memory_inputs_kernel, (len(z), n_head), 1, z, rate, *outputs, n_head, z.stride(0), eps,
                *_tile(d_k, d_v))
        return outputs
    z = z.to(wide)
    if rate is None:
        return l2_normalize(F.relu(z.unflatten(-1, (n_head, d_k))), eps)[0], *[None] * 4
    keys, v, beta, decay = z.tensor_split([2 * n_head * d_k, z.shape[1] - 2 * n_head, z.shape[1] - n_head], -1)
    q, k = l2_normalize(F.relu(keys.unflatten(-1, (-1, d_k))), eps)[0].split(n_head, 1)
    return q, k, v.unflatten(-1, (n_head, -1)), torch.exp(-rate * F.softplus(decay)), torch.sigmoid(beta)


def memory_inputs_backward(z, rate, eps, out, grad_q, grad_k=None, grad_v=None, grad_beta=None, grad_log=None):
    """Writes the gradient of z to out, from those of what `memory_inputs` gives; grad_log is that of decay's logarithm.

    Returns the gradient of rate for each row (N, H), or None without a rate.
    """
    n_head, d_k = grad_q.shape[1:]
    if use_triton(z):
        grad_rate, d_v = None, 0
        if rate is not None:
            grad_rate, d_v = torch.empty_like(grad_log), grad_v.shape[-1]
        _launch(_memory_inputs_backward_kernel, (len(z), n_head), 1, z, rate, grad_q, grad_k, grad_v, grad_beta,
                grad_log, out, grad_rate, n_head, z.stride(0), out.stride(0), eps, *_tile(d_k, d_v))
        return grad_rate
    z, grad_keys = z.to(grad_q.dtype), grad_q if rate is None else torch.cat([grad_q, grad_k], 1)
    n = grad_keys[0].numel()
    cut = F.relu(z[:, :n].unflatten(-1, (-1, d_k)))
    keys, length = l2_normalize(cut, eps)
    out[:, :n] = l2_normalize_backward(grad_keys, keys, (cut > 0) / length).flatten(1)
    if rate is None:
        return None
    beta, decay = torch.sigmoid(z[:, -2 * n_head:-n_head]), z[:, -n_head:]
    out[:, n:-2 * n_head] = grad_v.flatten(1)
    torch.mul(grad_beta, beta * (1 - beta), out=out[:, -2 * n_head:-n_head])
    torch.mul(grad_log, -rate * torch.sigmoid(decay), out=out[:, -n_head:])
    return -grad_log * F.softplus(decay)


# ---- the same pieces in Triton: a program takes a row, or a head of one ----


def _launch(kernel, grid, warps, *args):
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, num_warps=warps, num_stages=1)


def _tile(d_k, d_v):
    return d_k, d_v, triton.next_power_of_2(d_k), triton.next_power_of_2(max(d_v, 1))


@jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    more = 1 + small
    log1p = tl.where(more == 1, small, tl.log(more) * small / (more - 1))  # log(1 + small), exact for a small one
    return tl.maximum(x, 0) + log1p


@jit
def _load(x, i, seen):
    return tl.load(x + i, mask=seen, other=0.0).to(tl.float32)


@jit
def _gated_add_norm_kernel(x, z, add, y, direction, C, z_stride, eps, BLOCK: constexpr):
    """A row of `gated_add_norm`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place, seen = row * C + i, i < C
    out = _load(add, place, seen) + tl.sigmoid(_load(z, row * z_stride + i, seen)) * _load(x, place, seen)
    tl.store(y + place, out, mask=seen)
    tl.store(direction + place, out / tl.sqrt(tl.sum(out * out, 0) + eps * eps), mask=seen)


@jit
def _gated_add_norm_backward_kernel(out, grad, direction, inverse, grad_y, gate_value, C, BLOCK: constexpr):
    """A row of `gated_add_norm_backward`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place, seen = row * C + i, i < C
    g, n = _load(grad, place, seen), _load(direction, place, seen)
    g = (g - n * tl.sum(g * n, 0)) * tl.load(inverse + row)
    tl.store(out + place, g + _load(grad_y, place, seen) * _load(gate_value, place, seen), mask=seen)


@jit
def _glu_kernel(z, memory_read, y, Y, N, z_stride, eps, FFN: constexpr, READ: constexpr):
    """A row of `glu`; N of its Y columns are what was read from the memory."""
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


@jit
def _glu_backward_kernel(z, memory_read, grad, out, y, grad_read, Y, N, z_stride, out_stride, eps, FFN: constexpr,
                         READ: constexpr):
    """A row of `glu_backward`."""
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


@jit
def _normalized_key(z, i, seen, eps):
    """The key or query of a row of z, where the ReLU lets it through, and 1 / what it was divided by."""
    x = _load(z, i, seen)
    x = tl.where(x < 0, 0.0, x)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) + eps * eps)
    return x * inverse, x > 0, inverse


@jit
def _memory_inputs_kernel(z, rate, q, k, v, decay, beta, H, z_stride, eps, K: constexpr, D: constexpr, ROWS: constexpr,
                          COLUMNS: constexpr):
    """A head of a row of `memory_inputs`."""
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
        tl.store(beta + place, tl.sigmoid(tl.load(z).to(tl.float32)))
        tl.store(decay + place, tl.exp(-tl.load(rate + head) * _softplus(tl.load(z + H).to(tl.float32))))


@jit
def _memory_inputs_backward_kernel(z, rate, grad_q, grad_k, grad_v, grad_beta, grad_log, out, grad_rate, H, z_stride,
                                   out_stride, eps, K: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """A head of a row of `memory_inputs_backward`."""
    row, head, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    z, out, place, seen = z + row * z_stride, out + row * out_stride, row * H + head, i < K
    key, passed, inverse = _normalized_key(z + head * K, i, seen, eps)
    g = _load(grad_q, place * K + i, seen)
    tl.store(out + head * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
    if rate is not None:
        key, passed, inverse = _normalized_key(z + (H + head) * K, i, seen, eps)
        g = _load(grad_k, place * K + i, seen)
        tl.store(out + (H + head) * K + i, tl.where(passed, (g - key * tl.sum(g * key, 0)) * inverse, 0), mask=seen)
        tl.store(out + 2 * H * K + head * D + j, _load(grad_v, place * D + j, j < D), mask=j < D)
        beta_column = 2 * H * K + H * D + head
        decay_column = beta_column + H
        beta, log = tl.sigmoid(tl.load(z + beta_column).to(tl.float32)), tl.load(grad_log + place)
        a = tl.load(z + decay_column).to(tl.float32)
        tl.store(out + beta_column, tl.load(grad_beta + place) * beta * (1 - beta))
        tl.store(out + decay_column, -log * tl.load(rate + head) * tl.sigmoid(a))
        tl.store(grad_rate + place, -log * _softplus(a))


# ---- steps in C, for products in fp32, float64 or, with bf16 units, bf16 on CPU ----
#
# A step is three products of few rows and many small operators. In PyTorch launching those takes longer than the
# products, and the products take almost three times as long as in C (8 rows, two AVX-512 cores). With products in bf16
# their factors are rounded; what is between them, and what is kept of them, is fp32.


KEPT = Path(__file__).with_name('__pycache__')  # for built libraries: who can write there can write the bytecode too


@functools.cache
def _build(dtype):
    """gpn.c for this machine and dtype; None where that fails, as without a C compiler."""
    compiler = shlex.split(os.environ.get('CC', 'cc'))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    command = [*compiler, '-O3', '-march=native', '-fno-math-errno', '-fno-signed-zeros', '-fno-trapping-math',
               '-fassociative-math', '-shared', '-fPIC']
    command += {torch.float64: ['-DDOUBLE'], torch.bfloat16: ['-DBF16']}.get(dtype, [])
    source = Path(__file__).with_name('gpn.c')
    library = _library([*command, '-fopenmp'], source) or _library(command, source)  # OpenMP where there is one
    if library is None:
        return None
    real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    fields = [(name, ctypes.c_long) for name in (*'SBCFHKDL', 'threads')]
    fields += [(name, real) for name in ('state_eps', 'read_eps', 'key_eps')]
    library.sizes = type('sizes', (ctypes.Structure,), {'_fields_': fields})
    return library


def _library(command, source):
    """What the compiler's command makes of source, loaded; None where that fails.

    Building takes a second or two: the file is kept, by a hash of all that it depends on, and read from then on.
    """
    kept, about = None, subprocess.run([*command, '-dM', '-E', '-x', 'c', os.devnull], capture_output=True)
    if about.returncode == 0:  # the macros with which it starts: its version, and all that this CPU can do
        parts = [source.read_bytes(), repr(command).encode(), about.stdout]
        kept = KEPT / f'gpn-{hashlib.sha256(repr(parts).encode()).hexdigest()}.so'
        try:
            return ctypes.CDLL(kept)
        except OSError:  # it is not there, or not whole
            pass
    with tempfile.TemporaryDirectory() as folder:
        built = os.path.join(folder, 'gpn.so')
        if subprocess.run([*command, source, '-o', built, '-lm'], capture_output=True).returncode != 0:
            return None
        try:
            library = ctypes.CDLL(built)
        except OSError:  # a folder for data only
            return None
        if kept is not None:
            _keep(built, kept)
    return library


def _keep(built, kept):
    """Copies the file, whole or not at all; nothing where the folder cannot be written."""
    try:
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            os.replace(shutil.copy(built, folder), kept)
    except OSError:
        pass


class StepsInC:
    """`steps` and `segment_backward` as calls of gpn.c."""

    @staticmethod
    def serves(device, dtype):
        wanted = USE_C and not attn_kernels.REFERENCE and not attn_kernels.KERNELS_ON_CPU
        dtypes = torch.float32, torch.float64, torch.bfloat16
        return wanted and device.type == 'cpu' and dtype in dtypes and _build(dtype) is not None

    def __init__(self, products, rate, first_key, sizes, eps, dtype):
        """products: as in `Weights` (the backward has no biases), to be multiplied in dtype.

        eps: of state, read and key, whose lengths are sqrt(|x|^2 + eps^2).
        """
        self.library, self.sizes = _build(dtype), sizes
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32  # C's `real`
        self.numbers = self.library.sizes(0, 0, *sizes, 0, *eps)
        panels = [w if w is None else w.to(rate.dtype).contiguous() if w.dim() == 1 else self._panels(w.to(dtype))
                  for w in products]
        self.weights = [*panels, rate, first_key]  # held: C has only their addresses
        self.pointers = self._pointers(self.weights)

    def _panels(self, weight):
        """(n, c) -> (ceil(n / width), ceil(c / pair), width, pair), so that a tile reads its weights in a row."""
        width, pair = (ctypes.c_int.in_dll(self.library, name).value for name in ('panel', 'pair'))
        whole = F.pad(weight, (0, -weight.shape[1] % pair, 0, -len(weight) % width))
        return whole.unflatten(0, (-1, width)).unflatten(2, (-1, pair)).transpose(1, 2).contiguous()

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
        self.numbers.S, self.numbers.B, self.numbers.threads = *u.shape[:2], torch.get_num_threads()
        function(ctypes.byref(self.numbers), self.pointers, *map(self._convert, arguments))

    def steps(self, s, k, memory, u, carry_mask=None, active=None):
        s, k = s.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
        u, carry_mask, active = (x if x is None else x.contiguous() for x in (u, carry_mask, active))
        outputs = [torch.empty_like(u) for _ in range(self.sizes.n_layer)]
        outputs += [u.new_empty(*u.shape[:2], width) for width in self.sizes.saved_widths()]
        self._call(self.library.steps, u, s, k, memory, u, carry_mask, active, outputs)
        return s, k, memory, outputs

    def backward(self, is_cut, u, carry_mask, s, k, memory, grad, ds, dk, dm, *saved):
        (S, B, _), c = u.shape, self.sizes
        du, ds, dk, dm = torch.empty_like(u), ds.clone(), dk.clone(), dm.clone()
        inner, products = saved[:c.n_layer - 1], saved[c.n_layer - 1:]
        saved = [x.contiguous() for x in (*inner, u, *products)]  # u stands for the last states, which are not read
        drate, dfirst, memories = u.new_zeros(B, c.n_head), torch.zeros_like(dk), u.new_empty(S, *memory.shape)
        widths = [c.n_embd, c.n_embd]
        for layer in range(c.n_layer):
            widths += [sum(c.columns(layer)), c.n_embd, c.n_embd, c.n_ffn + c.n_head * c.d_v]
        pairs = [u.new_empty(S, B, width) for width in widths]
        inputs = [x if x is None else x.contiguous() for x in (u, carry_mask, s, k, memory, grad)]
        self._call(self.library.steps_backward, u, int(is_cut), *inputs, ds, dk, dm, saved, memories, du, drate, dfirst,
                   pairs)
        return du, ds, dk, dm, drate.sum(0), dfirst.sum(0), list(zip(pairs[::2], pairs[1::2]))


# ---- steps and their gradient in operators ----


def step(w, s, direction, k, memory, u, carry_mask=None, active=None):
    """`Model.step` on folded weights. The key is carried where the equations carry g: the next token needs no more of
    it.

    w a `Weights`; s, u (B, C); direction `l2_normalize`(s) (B, C); k (B, H, K), memory (B, H, K, D) written in place;
    carry_mask (B, 1), 0 where a document starts; active (B, 1) bool, false in rows that stay as they are.
    Returns s, direction, k and, for the backward, each layer's state and all products.
    """
    H, K, dtype = w.sizes.n_head, w.sizes.d_k, direction.dtype
    if carry_mask is not None:
        if active is not None:
            carry_mask = torch.where(active, carry_mask, 1.0)
        s, direction = s * carry_mask, direction * carry_mask.to(dtype)
        k = torch.where(carry_mask.unsqueeze(-1) > 0, k, w.first_key)
    z = product(direction, *w.ground)
    x, direction = gated_add_norm(z, s, u, w.state_eps, dtype)  # eq. 4
    next_k, states, products, memory_read = k, [], [z], None
    for i, (w_in, b_in, w_out) in enumerate(w.layers):
        z = product(direction, w_in, b_in)
        products.append(z)
        gate_in, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        if H:
            q, new_k, v, decay, beta = memory_inputs(memory_in, None if i else w.rate, H, K, w.key_eps)  # eq. 8, 9
            if i == 0:
                if active is not None:
                    decay, beta = torch.where(active, decay, 1.0), beta * active
                next_k = new_k
                memory_read = delta_step(memory, k, v, decay, beta, q, carry_mask)  # eq. 10
            else:
                memory_read = rows_times(q, memory)
            memory_read = memory_read.flatten(1)
            products.append(memory_read)
        y = glu(glu_in, memory_read, w.read_eps, dtype)
        x, direction = gated_add_norm(gate_in, x, product(y, w_out), w.state_eps, dtype)  # eq. 7, 11
        states.append(x)
    if active is not None:
        x, next_k = torch.where(active, x, s), torch.where(active.unsqueeze(-1), next_k, k)
    return x, direction, next_k, states, products


def steps(w, s, k, memory, u, carry_mask=None, active=None):
    """`step` for each of u (S, B, C), carry_mask and active (S, B, 1).

    Returns s, k, memory and, (S, B, ...) each, the layers' states and the products.
    """
    if w.in_c:
        return w.in_c.steps(s, k, memory, u, carry_mask, active)
    direction, outputs = l2_normalize(s, w.state_eps)[0].to(w.dtype), []
    for t in range(len(u)):
        masks = (x if x is None else x[t] for x in (carry_mask, active))
        s, direction, k, states, products = step(w, s, direction, k, memory, u[t], *masks)
        outputs.append((*states, *products))
    if len(u) == 1:  # decoding copies nothing
        return s, k, memory, [x.unsqueeze(0) for x in outputs[0]]
    return s, k, memory, [torch.stack(x) for x in zip(*outputs)]


def by_step(tensors):
    """{name: (S, ...)} -> for each step {name: (...)}, all at once: indexing one by one is slow."""
    return [dict(zip(tensors, row)) for row in zip(*(x.unbind() for x in tensors.values()))]


def segment_backward(w, is_cut, u, carry_mask, s, k, memory, grad, ds, dk, dm, *saved):
    """The gradient of the steps of a segment, `steps` backwards. w: the `Weights` of the backward.

    s (S, B, C), the predicted states that the steps start from; k (B, H, K), memory: before the first; grad (S, B, C),
    of the predicted states; ds, dk, dm: of the last state, of the next key and of the memory, from what comes after;
    is_cut: what comes after is another piece of truncated BPTT, and dk goes to the key's weights alone; saved: what
    `steps` gave, (S, B, ...) each, the states of all layers but the last, then the products. Returns the gradient of u
    (S, B, C), the new ds, dk, dm, those of the rates and of the first key, and for each weight of a product a pair: its
    gradient is the product of the two over all steps.
    """
    if w.in_c:
        return w.in_c.backward(is_cut, u, carry_mask, s, k, memory, grad, ds, dk, dm, *saved)
    (S, B, C), (_, n_ffn, H, K, D, L) = grad.shape, w.sizes
    inner, z0, saved = saved[:L - 1], saved[L - 1], saved[L:]

    def gated(x, z):
        """What the gradient of a gate and of the norm of x needs, and dz, room for the gradient of the product z."""
        (direction, length), gate_value = l2_normalize(x, w.state_eps), torch.sigmoid(z[..., :C].to(x.dtype))
        return dict(direction=direction, inverse=1 / length, gate_value=gate_value,
                    slope=x * gate_value * (1 - gate_value), dz=torch.empty_like(z))

    # what is not recurrent, for all steps at once
    s = s if carry_mask is None else s * carry_mask
    ground, layers = gated(s, z0), []
    for i, x in enumerate([torch.addcmul(u, ground['gate_value'], s), *inner]):
        z = saved[i * (1 + (H > 0))]
        _, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        y = u.new_empty(S, B, n_ffn + H * D, dtype=w.dtype)
        layer = gated(x, z) | dict(memory_in=memory_in, glu_in=glu_in, y=y)
        layer |= dict(zip(('d_gate_in', 'd_memory_in', 'd_glu_in'), layer['dz'].split(w.sizes.columns(i), -1)))
        if H:
            of_all_steps = memory_inputs(memory_in.flatten(0, 1), None if i else w.rate, H, K, w.key_eps)
            q, next_k, v, decay, beta = (x if x is None else x.unflatten(0, (S, B)) for x in of_all_steps)
            layer |= dict(q=q, memory_read=saved[2 * i + 1])
        if H and i == 0:
            k = torch.cat([k.unsqueeze(0), next_k[:-1]])
            if carry_mask is not None:
                k = torch.where(carry_mask.unsqueeze(-1) > 0, k, w.first_key)
            layer |= dict(k=k, v=v, decay=decay, beta=beta)
            memories = delta_replay(memory, k, v, decay, beta, carry_mask).unbind()
        layers.append(layer)

    # what is: the gradients of state, key and memory
    ground_steps, layer_steps = by_step(ground | dict(grad=grad)), [by_step(layer) for layer in layers]
    dx, du, drate, dfirst = [[] for _ in range(L)], [], u.new_zeros(B, H), u.new_zeros(B, H, K)
    for t in reversed(range(S)):
        ground_t = ground_steps[t]
        d = ds + ground_t['grad']
        for i in reversed(range(L)):
            layer_t, (w_in, _, w_out) = layer_steps[i][t], w.layers[i]
            dx[i].append(d)
            torch.mul(d, layer_t['slope'], out=layer_t['d_gate_in'])
            dread = glu_backward(product(d, w_out), layer_t['glu_in'], layer_t.get('memory_read'), w.read_eps,
                                 layer_t['d_glu_in'], layer_t['y'])
            dz, dread = layer_t['dz'], dread.view(B, H, D) if H else None
            if H and i == 0:
                dq, dk_before, dv, dbeta, dlog = delta_step_backward(
                    dm, memories[t], layer_t['k'], layer_t['v'], layer_t['decay'], layer_t['beta'], layer_t['q'], dread,
                    None if carry_mask is None else carry_mask[t])
                drate += memory_inputs_backward(layer_t['memory_in'], w.rate, w.key_eps, layer_t['d_memory_in'], dq, dk,
                                                dv, dbeta, dlog)
                dk = dk_before
                if is_cut and t == S - 1:
                    dz = dz.clone()
                    dz[:, C + H * K:C + 2 * H * K] = 0
            elif H:
                dq = rows_times(dread, memories[t + 1].transpose(-1, -2))
                dm.addcmul_(layer_t['q'].unsqueeze(-1), dread.unsqueeze(-2))
                memory_inputs_backward(layer_t['memory_in'], None, w.key_eps, layer_t['d_memory_in'], dq)
            d = gated_add_norm_backward(product(dz, w_in), layer_t['direction'], layer_t['inverse'], d,
                                        layer_t['gate_value'])
        du.append(d)
        torch.mul(d, ground_t['slope'], out=ground_t['dz'])
        ds = gated_add_norm_backward(product(ground_t['dz'], w.ground[0]), ground_t['direction'], ground_t['inverse'],
                                     d, ground_t['gate_value'])
        if carry_mask is not None:
            carries = carry_mask[t].unsqueeze(-1)
            ds, dfirst, dk = ds * carry_mask[t], dfirst + dk * (1 - carries), dk * carries

    def stack(last_first):
        return torch.stack(last_first[::-1])

    pairs = [(ground['dz'], ground['direction'])]
    for i, layer in enumerate(layers):
        pairs += [(layer['dz'], layer['direction']), (stack(dx[i]), layer['y'])]
    return stack(du), ds, dk, dm, drate.sum(0), dfirst.sum(0), pairs


# ---- segments as CUDA graphs ----


class Graph:
    """A function of tensors, or None, as a CUDA graph. Its results are overwritten by the next replay."""

    def __init__(self, function, inputs):
        self.inputs = [x if x is None else x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what happens only once, as compiling kernels
            function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):  # nccl's own thread may go on
            self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(self.inputs, inputs):
            if own is not None:
                own.copy_(x)
        self.graph.replay()
        return self.results


_graphs, _graph_weights = {}, {}  # made once for each shape, and kept


def forget_graphs():
    """Frees the graphs and their weights; they are made again when they are needed."""
    _graphs.clear()
    _graph_weights.clear()


def uses_graphs(x):
    return USE_GRAPHS and x.is_cuda


def segment_weights(folded, *options):
    """`Weights`, for `run_segment`. With graphs always the same tensors, which graphs read, with new values."""
    w = Weights(folded, *options)
    if not uses_graphs(folded[0]):
        return w
    key = (*options, folded[0].device, folded[0].shape, folded[0].dtype)
    if key not in _graph_weights:
        _graph_weights[key] = Weights([x.clone() for x in folded], *options)
        _graph_weights[key].graphs = True
    for own, x in zip(_graph_weights[key].tensors(), w.tensors()):
        own.copy_(x)
    return _graph_weights[key]


def run_segment(function, w, inputs, *options):
    """function(w, *options, *inputs), inputs tensors or None; with graphs the next call overwrites the results."""
    if not w.graphs:
        return function(w, *options, *inputs)
    key = (function, w, *options, *(x if x is None else (x.shape, x.dtype) for x in inputs))
    if key not in _graphs:
        _graphs[key] = Graph(functools.partial(function, w, *options), inputs)
    return _graphs[key].replay(inputs)


# ---- the operator over a window: one to PyTorch, so that a compiler meets no loop ----


def segments(T, segment_len, bptt_len):
    """[(first step, end)] of the pieces whose memories are recomputed at once; a gradient is cut only between two."""
    starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len)})
    return list(zip(starts, [*starts[1:], T]))


def scan_forward(u: torch.Tensor, carry_mask: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int],
                 eps: list[float], dtype: torch.dtype, segment_len: int, bptt_len: int,
                 record: bool) -> list[torch.Tensor]:
    """u (T, B, C), carry_mask (T, B, 1) or None -> predicted states (T, B, C), and with record what the backward needs.

    That is the memory at the start of each of `segments` (R, B, H, K, D), the states between layers (T, B, C) and the
    products (T, B, width), in dtype; from C in u's.
    """
    T, sizes = len(u), Sizes(*sizes)
    L = sizes.n_layer
    with torch.autocast(u.device.type, enabled=False):
        w = (segment_weights if record else Weights)(folded, sizes, tuple(eps), dtype)
        outputs = _empty_outputs(u, sizes, dtype, segment_len, bptt_len, record)
        out, memories, *saved = outputs
        s, k, memory = torch.zeros_like(u[0]), w.first_key.repeat(u.shape[1], 1, 1), torch.zeros_like(memories[0])
        for r, (a, b) in enumerate(segments(T, segment_len, bptt_len)):
            if record:
                memories[r] = memory
            inputs = [s, k, memory, u[a:b], None if carry_mask is None else carry_mask[a:b]]
            s, k, memory, step_outputs = run_segment(steps, w, inputs)
            out[a:b] = step_outputs[L - 1]
            for x, part in zip(saved, (*step_outputs[:L - 1], *step_outputs[L:])):  # none without record
                x[a:b] = part
    return outputs


def _empty_outputs(u, sizes, dtype, segment_len, bptt_len, record):
    """Room for what `scan_forward` returns."""
    T, B, _ = u.shape
    R = len(segments(T, segment_len, bptt_len)) if record else 1
    outputs = [torch.empty_like(u), u.new_empty(R, B, sizes.n_head, sizes.d_k, sizes.d_v)]
    if record:
        outputs += [torch.empty_like(u) for _ in range(sizes.n_layer - 1)]
        saved = u.dtype if StepsInC.serves(u.device, dtype) else dtype
        outputs += [u.new_empty(T, B, width, dtype=saved) for width in sizes.saved_widths()]
    return outputs


def scan_backward(grad: torch.Tensor, u: torch.Tensor, carry_mask: torch.Tensor | None, folded: list[torch.Tensor],
                  outputs: list[torch.Tensor], sizes: list[int], eps: list[float], dtype: torch.dtype,
                  segment_len: int, bptt_len: int) -> list[torch.Tensor]:
    """Gradients of u and of the folded weights from grad (T, B, C), that of the predicted states.

    Only the gradients of state, key and memory go through the steps; those of the weights are one large product each a
    segment.
    """
    (T, B, C), sizes, (out, memories, *saved) = u.shape, Sizes(*sizes), outputs
    L, H, K = sizes.n_layer, sizes.n_head, sizes.d_k

    def add_product(total, dout, x):
        dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
        if dtype == total.dtype:
            total.addmm_(dout.T, x)
        else:
            total.add_(dout.T @ x)

    with torch.autocast(u.device.type, enabled=False):
        w, grad_u = segment_weights(folded, sizes, tuple(eps), dtype, True), torch.empty_like(u)
        totals = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        ds, dk, dm = u.new_zeros(B, C), u.new_zeros(B, H, K), torch.zeros_like(memories[0])
        for (a, b), memory in reversed(list(zip(segments(T, segment_len, bptt_len), memories))):
            s = out[a - 1:b - 1] if a else F.pad(out[:b - 1], (0, 0, 0, 0, 1, 0))
            k = w.first_key.repeat(B, 1, 1)
            if a and H:  # the key that the step before made
                key = saved[L][a - 1, :, C + H * K:C + 2 * H * K].to(u.dtype).unflatten(-1, (H, K))
                k = l2_normalize(F.relu(key), w.key_eps)[0]
            inputs = [u[a:b], None if carry_mask is None else carry_mask[a:b], s, k, memory, grad[a:b], ds, dk, dm,
                      *(x[a:b] for x in saved)]
            is_cut = b < T and b % bptt_len == 0
            grad_u[a:b], ds, dk, dm, drate, dfirst, pairs = run_segment(segment_backward, w, inputs, is_cut)
            add_product(totals[0], *pairs[0])
            totals[1] += pairs[0][0].sum((0, 1))
            for i in range(L):
                (dz, direction), (dx, y) = pairs[1 + 2 * i:3 + 2 * i]
                add_product(totals[2 + 3 * i], dz, direction)
                totals[3 + 3 * i] += dz.sum((0, 1))
                add_product(totals[4 + 3 * i], dx, y)
            if H:
                totals[-2] += drate
                totals[-1] += dfirst if a else dfirst + dk.sum(0)
            if a % bptt_len == 0:  # the key's gradient goes to its weights, in the step before, and no further
                ds, dm = torch.zeros_like(ds), torch.zeros_like(dm)
    return [grad_u, *(total.to(x.dtype) for total, x in zip(totals, folded))]


_scan_op = torch.library.custom_op('gpn::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op('gpn::scan_backward', scan_backward, mutates_args=())


@_scan_op.register_fake
def _(u, carry_mask, folded, sizes, eps, dtype, segment_len, bptt_len, record):
    return _empty_outputs(u, Sizes(*sizes), dtype, segment_len, bptt_len, record)


@_scan_backward_op.register_fake
def _(grad, u, carry_mask, folded, *_):
    return [torch.empty_like(x) for x in (u, *folded)]


def _save_for_backward(ctx, inputs, output):
    u, carry_mask, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, carry_mask, *folded, *output)
    ctx.n_folded = len(folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grads):
    u, carry_mask, *tensors = ctx.saved_tensors
    folded, outputs = tensors[:ctx.n_folded], tensors[ctx.n_folded:]
    grad_u, *grad_folded = _scan_backward_op(grads[0].contiguous(), u, carry_mask, folded, outputs, *ctx.numbers)
    return grad_u, None, grad_folded, *[None] * 6


_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def scan(u, carry_mask, folded, sizes, eps, dtype, segment_len, bptt_len):
    """`step` over a window: u (T, B, C), carry_mask (T, B, 1) or None, folded from `fold` -> predicted states (T, B,
    C).

    Products are in dtype; state and memory are in u's.
    """
    record = torch.is_grad_enabled()
    return _scan_op(u.contiguous(), carry_mask, folded, list(sizes), eps, dtype, segment_len, bptt_len, record)[0]


def scan_window(model, u, carry_mask=None):
    """`Model.loop` of a GPN: u (B, T, C) in fp32 at least, carry_mask (B, T, 1) or None -> states (B, T, C)."""
    c, dtype, kind = model.config, model.fuse.weight.dtype, u.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:  # which autocast leaves alone
        of_autocast = torch.get_autocast_dtype(kind)
        if u.is_cuda or StepsInC.serves(u.device, of_autocast):
            dtype = of_autocast
    bptt_len = c.bptt_len or u.shape[1]
    if carry_mask is not None:
        carry_mask = carry_mask.transpose(0, 1)
    states = scan(u.transpose(0, 1), carry_mask, fold(model), Sizes.of(c), model.all_eps, dtype, c.segment_len,
                  bptt_len)
    return states.transpose(0, 1)


# ---- decoding ----


class Decoder:
    """Decoding by `steps` on weights folded once: what goes from token to token is s, k, M."""

    @torch.no_grad()
    def __init__(self, model, device):
        c, dtype = model.config, model.fuse.weight.dtype
        self.sizes, self.segment_len = Sizes.of(c), c.segment_len
        self.weights = Weights([w.to(device, copy=True) for w in fold(model)], self.sizes, model.all_eps, dtype)

    def first_state(self, batch_size):
        """s, k and M before a document's first token."""
        c, k = self.sizes, self.weights.first_key.repeat(batch_size, 1, 1)
        return k.new_zeros(batch_size, c.n_embd), k, k.new_zeros(batch_size, c.n_head, c.d_k, c.d_v)

    def steps(self, state, u, carry_mask, active):
        """The next tokens of each row: u (B, n, C), carry_mask (B, n, 1), active (B, n) -> states (B, n, C), the new
        state.

        The memory of `state` is written in place.
        """
        states = []
        with torch.autocast('cuda' if u.is_cuda else 'cpu', enabled=False):  # else it would read the memory in bf16
            for a in range(0, u.shape[1], self.segment_len):  # a part's products are held at once
                part = [x[:, a:a + self.segment_len].transpose(0, 1) for x in (u, carry_mask, active.unsqueeze(-1))]
                *state, outputs = steps(self.weights, *state, *part)
                states.append(outputs[self.sizes.n_layer - 1].transpose(0, 1))
        return torch.cat(states, 1), state
