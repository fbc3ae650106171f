"""GPN's equations over a window as one operator, and its gradient."""
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import attn_kernels
from attn_kernels import constexpr, jit, tl, triton
from scans.delta_rule import _gpn_kernels_serve, delta_replay, delta_step, delta_step_backward, rows_times

COMPILE = True  # build the steps in C where there is a compiler


# ---- what is between the products of a step ----


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


# ---- the steps in C ----


@functools.cache
def _build_gpn(dtype):
    """gpn.c for this machine and dtype, built in a second or two; None where that fails, as without a C compiler."""
    compiler = shutil.which(os.environ.get('CC', 'cc'))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name('gpn.c'), os.path.join(folder, 'gpn.so')
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
        wanted = COMPILE and not attn_kernels.REFERENCE and not attn_kernels.KERNELS_ON_CPU and device.type == 'cpu' and dtype in (torch.float32, torch.float64)
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


# ---- steps and their gradient ----


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
        """Widths of a layer's product in: gate | query and, where it writes, key, value, beta, decay | silu'd: feed-forward, read gate; up."""
        writes = self.n_head * (self.d_k + self.d_v + 2) if layer == 0 else 0
        return [self.n_embd, self.n_head * self.d_k + writes, 2 * self.n_ffn + self.n_head * self.d_v]

    def kept(self):
        """Widths of what the backward needs of a step's products: the ground's, each layer's product in and, with a memory, its answer."""
        answer = [self.n_head * self.d_v] * (self.n_head > 0)
        return [self.n_embd, *(width for i in range(self.n_layer) for width in (sum(self.columns(i)), *answer))]


class Weights:
    """`Model._folded` as products in one dtype. backward: the products of a gradient with the weights instead."""

    graphs = False  # CUDA graphs read these tensors

    def __init__(self, folded, sizes, eps, dtype, backward=False):
        device, wide = folded[0].device, torch.promote_types(folded[0].dtype, torch.float32)
        no_memory = [torch.zeros(0, sizes.d_k, device=device)] * 2
        self.rate, self.first_key = (x.detach().to(wide) for x in (folded[-2:] if sizes.n_head else no_memory))
        self.state_eps, self.answer_eps, self.key_eps = (sizes.n_embd * eps) ** 0.5, (sizes.n_head * sizes.d_v * eps) ** 0.5, 1e-6
        products = [w.detach().to(dtype) for w in folded[:2 + 3 * sizes.n_layer]]
        if backward:
            products = [w.T if w.dim() == 2 else None for w in products]
        self.sizes, self.dtype, self.in_c = sizes, dtype, None
        if dtype == wide and GPNInC.serves(device, dtype):
            self.in_c = GPNInC(products, self.rate, self.first_key, sizes, (self.state_eps, self.answer_eps, self.key_eps))
            return
        products = [w if w is None or w.dim() == 1 else packed(w) for w in products]
        self.ground, self.layers = products[:2], [products[i:i + 3] for i in range(2, len(products), 3)]

    def tensors(self):
        return [x for x in (*self.ground, *(x for layer in self.layers for x in layer), self.rate, self.first_key) if x is not None]


def packed(weight):
    """The weight in the layout of the CPU's matrix units, where this PyTorch can (private operators): products of few rows are bound
    by reading it, and take half the time. Elsewhere the weight itself."""
    reorder = getattr(torch.ops.mkldnn, '_reorder_linear_weight', None)
    if weight.device.type == 'cpu' and weight.dtype != torch.float64 and reorder is not None and torch.backends.mkldnn.is_available():
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
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '') if weight.is_mkldnn else F.linear(x, weight, bias)


def step(w, s, direction, k, memory, u, keep=None, active=None):
    """`Model.step` on folded weights. The key is carried where the equations carry g: it is all of it that the next token needs.

    w a `Weights`; s, u (B, C); direction `unit`(s) (B, C); k (B, H, K), memory (B, H, K, D) written in place; keep (B, 1), 0 where a
    document starts; active (B, 1) bool, false in rows that stay as they are. Returns s, direction, k and, for the backward, each
    layer's state and all products.
    """
    H, K, dtype = w.sizes.n_head, w.sizes.d_k, direction.dtype
    if keep is not None:
        keep = keep if active is None else torch.where(active, keep, 1.0)
        s, direction = s * keep, direction * keep.to(dtype)
        k = torch.where(keep.unsqueeze(-1) > 0, k, w.first_key)
    z = product(direction, *w.ground)
    x, direction = gate(z, s, u, w.state_eps, dtype)  # eq. 4
    next_k, states, products, answer = k, [], [z], None
    for i, (enter, bias, leave) in enumerate(w.layers):
        z = product(direction, enter, bias)
        products.append(z)
        gate_in, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        if H:
            q, new_k, v, decay, beta = heads(memory_in, None if i else w.rate, H, K, w.key_eps)  # eq. 8, 9
            if i == 0:
                if active is not None:
                    decay, beta = torch.where(active, decay, 1.0), beta * active
                next_k, answer = new_k, delta_step(memory, k, v, decay, beta, q, keep)  # eq. 10
            else:
                answer = rows_times(q, memory)
            answer = answer.flatten(1)
            products.append(answer)
        y = glu(glu_in, answer, w.answer_eps, dtype)
        x, direction = gate(gate_in, x, product(y, leave), w.state_eps, dtype)  # eq. 7, 11
        states.append(x)
    if active is not None:
        x, next_k = torch.where(active, x, s), torch.where(active.unsqueeze(-1), next_k, k)
    return x, direction, next_k, states, products


def steps(w, s, k, memory, u, keep=None, active=None):
    """`step` for each of u (n, B, C), keep and active (n, B, 1). Returns s, k, memory and, (n, B, ...) each, the layers' states and the
    products."""
    if w.in_c:
        return w.in_c.steps(s, k, memory, u, keep, active)
    rows, direction, at = [], unit(s, w.state_eps)[0].to(w.dtype), lambda x, j: None if x is None else x[j]
    for j in range(len(u)):
        s, direction, k, states, products = step(w, s, direction, k, memory, u[j], at(keep, j), at(active, j))
        rows.append((*states, *products))
    return s, k, memory, [torch.stack(row) if len(u) > 1 else row[0].unsqueeze(0) for row in zip(*rows)]  # decoding copies nothing


def segment_gradient(w, cut_end, u, keep, s, k, memory, grad, ds, dk, dm, *kept):
    """The gradient of the steps of a segment, `steps` backwards.

    s (S, B, C), the predicted states that the steps start from; k (B, H, K), memory: before the first; grad (S, B, C), of the
    predicted states; ds, dk, dm: of the last state, of the next key and of the memory, from what comes after; cut_end: that is
    another piece of truncated BPTT, and dk then reaches the weights only; kept: what `steps` gave, (S, B, ...) each, the states of
    all layers but the last, then the products.
    Returns the gradient of u (S, B, C), the new ds, dk, dm, those of the rates and of the first key, and for each weight of a
    product a pair: its gradient is the product of the two over all steps.
    """
    if w.in_c:
        return w.in_c.gradient(cut_end, u, keep, s, k, memory, grad, ds, dk, dm, *kept)
    (S, B, C), (_, n_ffn, H, K, D, L) = grad.shape, w.sizes
    inner, z0, kept = kept[:L - 1], kept[L - 1], kept[L:]

    def gated(x, z):
        (direction, length), gate = unit(x, w.state_eps), torch.sigmoid(z[..., :C].to(x.dtype))
        return dict(direction=direction, inverse=1 / length, gate=gate, slope=x * gate * (1 - gate), dz=torch.empty_like(z))

    # what is not recurrent, for all steps at once
    s = s if keep is None else s * keep
    ground, layers = gated(s, z0), []
    for i, x in enumerate([torch.addcmul(u, ground['gate'], s), *inner]):
        z = kept[i * (1 + (H > 0))]
        _, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        layer = gated(x, z) | dict(memory_in=memory_in, glu_in=glu_in, y=u.new_empty(S, B, n_ffn + H * D, dtype=w.dtype))
        layer |= dict(zip(('d_gate_in', 'd_memory_in', 'd_glu_in'), layer['dz'].split(w.sizes.columns(i), -1)))
        if H:
            of_all_steps = heads(memory_in.flatten(0, 1), None if i else w.rate, H, K, w.key_eps)
            q, next_k, v, decay, beta = (x if x is None else x.unflatten(0, (S, B)) for x in of_all_steps)
            layer |= dict(q=q, answer=kept[2 * i + 1])
        if H and i == 0:
            k = torch.cat([k.unsqueeze(0), next_k[:-1]])
            k = k if keep is None else torch.where(keep.unsqueeze(-1) > 0, k, w.first_key)
            layer |= dict(k=k, v=v, decay=decay, beta=beta)
            memories = delta_replay(memory, k, v, decay, beta, keep).unbind()
        layers.append(layer)

    # what is: the gradients of state, key and memory
    rows = lambda parts: [dict(zip(parts, row)) for row in zip(*(x.unbind() for x in parts.values()))]  # once: indexing is slow
    at_ground, at_layers = rows(ground | dict(grad=grad)), [rows(layer) for layer in layers]
    dx, du, drate, first_key = [[] for _ in range(L)], [], u.new_zeros(B, H), u.new_zeros(B, H, K)
    for j in reversed(range(S)):
        at = at_ground[j]
        d = ds + at['grad']
        for i in reversed(range(L)):
            here, (enter, _, leave) = at_layers[i][j], w.layers[i]
            dx[i].append(d)
            torch.mul(d, here['slope'], out=here['d_gate_in'])
            answer = glu_gradient(product(d, leave), here['glu_in'], here.get('answer'), w.answer_eps, here['d_glu_in'], here['y'])
            z, answer = here['dz'], answer.view(B, H, D) if H else None
            if H and i == 0:
                dq, dk_before, dv, dbeta, dlog = delta_step_backward(dm, memories[j], here['k'], here['v'], here['decay'], here['beta'], here['q'],
                                                                     answer, None if keep is None else keep[j])
                drate += heads_gradient(here['memory_in'], w.rate, w.key_eps, here['d_memory_in'], dq, dk, dv, dbeta, dlog)
                dk = dk_before
                if cut_end and j == S - 1:
                    z = z.clone()
                    z[:, C + H * K:C + 2 * H * K] = 0
            elif H:
                dq = rows_times(answer, memories[j + 1].transpose(-1, -2))
                dm.addcmul_(here['q'].unsqueeze(-1), answer.unsqueeze(-2))
                heads_gradient(here['memory_in'], None, w.key_eps, here['d_memory_in'], dq)
            d = gate_gradient(product(z, enter), here['direction'], here['inverse'], d, here['gate'])
        du.append(d)
        torch.mul(d, at['slope'], out=at['dz'])
        ds = gate_gradient(product(at['dz'], w.ground[0]), at['direction'], at['inverse'], d, at['gate'])
        if keep is not None:
            goes_on = keep[j].unsqueeze(-1)
            ds, first_key, dk = ds * keep[j], first_key + dk * (1 - goes_on), dk * goes_on
    stack = lambda rows: torch.stack(rows[::-1])
    pairs = [(ground['dz'], ground['direction'])]
    for i, layer in enumerate(layers):
        pairs += [(layer['dz'], layer['direction']), (stack(dx[i]), layer['y'])]
    return stack(du), ds, dk, dm, drate.sum(0), first_key.sum(0), pairs


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
GRAPHS = True  # in training on a GPU a segment is one CUDA graph, as its kernels are too small for their launches
_graphs, _graph_weights = {}, {}  # made once for each shape, and kept


def uses_graphs(x):
    return GRAPHS and x.is_cuda


def segment_weights(folded, *options):
    """`Weights`, for `run_segment`: with graphs always the same tensors with new values, as graphs read the ones they were made with."""
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
    """function(w, *options, *inputs), the inputs tensors or None; with graphs, results that the next call overwrites."""
    if not w.graphs:
        return function(w, *options, *inputs)
    key = (function, w, *options, *(x if x is None else (x.shape, x.dtype) for x in inputs))
    if key not in _graphs:
        _graphs[key] = Graph(functools.partial(function, w, *options), inputs)
    return _graphs[key].replay(inputs)


def segments(T, segment_len, bptt_len):
    """[(first step, end)] of the pieces whose memories are recomputed at once; a gradient's cut is always between two."""
    starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len)})
    return list(zip(starts, [*starts[1:], T]))


# ---- the operator ----


def scan_forward(u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int], eps: float, dtype: torch.dtype,
                 segment_len: int, bptt_len: int, record: bool) -> list[torch.Tensor]:
    """u (T, B, C), keep (T, B, 1) or None -> predicted states (T, B, C); then, if record, what the backward needs: the memory at the
    start of each of `segments` (R, B, H, K, D), the states between layers (T, B, C) and the products (T, B, width) in dtype."""
    T, sizes, n = len(u), Sizes(*sizes), sizes[-1]
    with torch.autocast(u.device.type, enabled=False):
        w = (segment_weights if record else Weights)(folded, sizes, eps, dtype)
        outputs = _scan_outputs(u, Sizes(*sizes), dtype, segment_len, bptt_len, record)
        out, memories, *kept = outputs
        s, k, memory = torch.zeros_like(u[0]), w.first_key.repeat(u.shape[1], 1, 1), torch.zeros_like(memories[0])
        for r, (a, b) in enumerate(segments(T, segment_len, bptt_len)):
            if record:
                memories[r] = memory
            s, k, memory, rows = run_segment(steps, w, [s, k, memory, u[a:b], None if keep is None else keep[a:b]])
            out[a:b] = rows[n - 1]
            for x, row in zip(kept, (*rows[:n - 1], *rows[n:])):  # none without record
                x[a:b] = row
    return outputs


def _scan_outputs(u, sizes, dtype, segment_len, bptt_len, record):
    """Empty tensors for what `scan_forward` returns."""
    (T, B, _), H = u.shape, sizes.n_head
    if not record:
        return [torch.empty_like(u), u.new_empty(1, B, H, sizes.d_k, sizes.d_v)]
    return [torch.empty_like(u), u.new_empty(len(segments(T, segment_len, bptt_len)), B, H, sizes.d_k, sizes.d_v),
            *(torch.empty_like(u) for _ in range(sizes.n_layer - 1)), *(u.new_empty(T, B, width, dtype=dtype) for width in sizes.kept())]


def scan_backward(grad: torch.Tensor, u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], outputs: list[torch.Tensor],
                  sizes: list[int], eps: float, dtype: torch.dtype, segment_len: int, bptt_len: int) -> list[torch.Tensor]:
    """Gradients of u and of the folded weights from grad (T, B, C), that of the predicted states.

    Only the gradients of state, key and memory go through the steps; those of the weights are one large product each a segment.
    """
    (T, B, C), sizes, (out, memories, *kept) = u.shape, Sizes(*sizes), outputs
    L, H, K = sizes.n_layer, sizes.n_head, sizes.d_k

    def add(grad, dout, x):
        dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
        grad.addmm_(dout.T, x) if dtype == grad.dtype else grad.add_(dout.T @ x)

    with torch.autocast(u.device.type, enabled=False):
        w, grad_u = segment_weights(folded, sizes, eps, dtype, True), torch.empty_like(u)
        grads = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        ds, dk, dm = u.new_zeros(B, C), u.new_zeros(B, H, K), torch.zeros_like(memories[0])
        for (a, b), memory in reversed(list(zip(segments(T, segment_len, bptt_len), memories))):
            s = out[a - 1:b - 1] if a else F.pad(out[:b - 1], (0, 0, 0, 0, 1, 0))
            k = w.first_key.repeat(B, 1, 1)
            if a and H:
                k = unit(F.relu(kept[L][a - 1, :, C + H * K:C + 2 * H * K].to(u.dtype).unflatten(-1, (H, K))), w.key_eps)[0]
            inputs = [u[a:b], None if keep is None else keep[a:b], s, k, memory, grad[a:b], ds, dk, dm, *(x[a:b] for x in kept)]
            grad_u[a:b], ds, dk, dm, rate, first_key, pairs = run_segment(segment_gradient, w, inputs, b < T and b % bptt_len == 0)
            add(grads[0], *pairs[0])
            grads[1] += pairs[0][0].sum((0, 1))
            for i in range(L):
                (dz, n), (dx, y) = pairs[1 + 2 * i:3 + 2 * i]
                add(grads[2 + 3 * i], dz, n)
                grads[3 + 3 * i] += dz.sum((0, 1))
                add(grads[4 + 3 * i], dx, y)
            if H:
                grads[-2] += rate
                grads[-1] += first_key if a else first_key + dk.sum(0)
            if a % bptt_len == 0:
                ds, dm = torch.zeros_like(ds), torch.zeros_like(dm)  # the key's goes to its weights, in the step before, and no further
    return [grad_u, *(g.to(x.dtype) for g, x in zip(grads, folded))]
_scan_op = torch.library.custom_op('gpn::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op('gpn::scan_backward', scan_backward, mutates_args=())
_scan_op.register_fake(lambda u, keep, folded, sizes, eps, dtype, segment_len, bptt_len, record:
                       _scan_outputs(u, Sizes(*sizes), dtype, segment_len, bptt_len, record))
_scan_backward_op.register_fake(lambda grad, u, keep, folded, *_: [torch.empty_like(x) for x in (u, *folded)])


def _save_for_backward(ctx, inputs, output):
    u, keep, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, keep, *folded, *output)
    ctx.n_folded = len(folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grads):
    u, keep, *saved = ctx.saved_tensors
    folded, outputs = saved[:ctx.n_folded], saved[ctx.n_folded:]
    grad_u, *grad_folded = _scan_backward_op(grads[0].contiguous(), u, keep, folded, outputs, *ctx.numbers)
    return grad_u, None, grad_folded, *[None] * 6
_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def scan(u, keep, folded, sizes, eps, dtype, segment_len, bptt_len):
    """`step` over a window: u (T, B, C), keep (T, B, 1) or None, folded from `Model._folded` -> predicted states (T, B, C).

    Products in dtype; state and memory in u's. One operator to PyTorch, so that a compiler meets no loop."""
    return _scan_op(u.contiguous(), keep, folded, list(sizes), eps, dtype, segment_len, bptt_len, torch.is_grad_enabled())[0]
