"""Weights of 8 bits: `sample.py --weights=int8`, `eval.py --weights=int8`.

Decoding is bound by the bytes of weights that it reads for a token, and these are a quarter of fp32's. Each row of a
linear layer's matrix W (N, K) is held as whole numbers with a scale, and so are the vectors x (M, K) that it multiplies
on a CPU:

    W[n] ~ w_scale[n] W8[n]    x[m] ~ x_scale[m] x8[m]    W8, x8 in -127 ... 127, scale = the row's largest / 127

    y[m, n] = x_scale[m] w_scale[n] (x8[m] . W8[n])

The sum is exact. A vector has a scale of its own, so its product does not depend on what is multiplied beside it: a
text's logits are the same alone and in a batch, read at once and token by token.

Measured on a Xeon with VNNI and without AMX, one thread, a head of 50304 x 512, 1 and 16 vectors: fp32 packed 6.7 and
12.1 ms; bf16 packed 3.6 and 33.8; this 1.1 and 3.4; `torch._int_mm` 2.5 and 8; `_weight_int8pack_mm` in bf16, whose
vectors stay as they are, 3.5 and 16. Signed x8 would be a thousand times slower there.

On a GPU the vectors stay as they are too: a Triton kernel reads the 8 bits of a weight and multiplies in the dtype of
x. It has not run on a GPU yet.
"""
import functools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import constexpr, jit, tl, triton
from common.cpu_forms import Choices, choose_cache, pack_weights
from common.extend_check import has_right_extend
from common.files import UserError

X_ZERO = 128  # x8 is passed as x8 + 128, of 8 bits without a sign
ROUND, LARGEST = torch.tensor(X_ZERO + 0.5), torch.tensor(127.0)  # tensors: operators are faster with them
MAX_ROWS = 64  # of x that the kernel multiplies: more are bound by arithmetic, which the GPU's library is faster at


def check_weights_setting(weights: str | None) -> None:
    """Raises UserError for a --weights that there is not."""
    if weights not in (None, 'int8'):
        raise UserError(f'weights is {weights!r}: expected int8, or leave it out for the weights as they were trained')


def prepare_weights(model: nn.Module, weights: str | None, folder=None) -> nn.Module:
    """Makes a model ready to decode, in place: with weights of 8 bits for 'int8', else with its own, packed.

    folder: of its run, which keeps what is faster on this machine. With several processes all must come here.
    """
    choices = Choices(folder)
    if weights is None:
        pack_weights(model, choices)
    else:
        choose_cache(model, choices)
        quantize(model)
    choices.keep()
    return model


def quantize(model: nn.Module) -> nn.Module:
    """Replaces the weight of every linear layer by 8-bit numbers and a scale per row, in place, for inference only.

    A table of embeddings stays as it is; a head that shares it gets a copy. UserError for a model that multiplies by
    its matrices without calling its layers.
    """
    if getattr(model, 'scan_report', 0) is None:
        model.choose_scan()  # its check moves the weights by noise, which whole numbers cannot be
    has_right_extend(model)  # now: activations that round apart in the two forms would look like an edit
    if getattr(model, 'reads_weights', False):
        raise UserError(f'{type(model).__module__} multiplies by its weights without calling its linear layers, as '
                        'this run uses it, so they cannot be int8: leave --weights out')
    for module in model.modules():
        if type(module) is nn.Linear:
            weight, scale = int8_rows(module.weight.detach())
            if weight.device.type == 'cpu' and has_cpu_product():
                weight = torch.ops.onednn.qlinear_prepack(weight, None)
                module.forward = functools.partial(_cpu_linear, weight, scale / LARGEST, _zeros(scale), module.bias)
            elif weight.device.type == 'cuda' and has_gpu_product(weight.device):
                module.forward = functools.partial(_gpu_linear, weight, scale, module.bias)
            else:
                module.forward = functools.partial(_plain_linear, weight, scale, module.bias)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def int8_rows(weight) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (N, K) -> int8 (N, K) and the scale of each row (N,), fp32."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _cpu_linear(weight, w_scale, w_zeros, bias, x):
    """x (..., K) -> (..., N), with a packed weight; w_zeros: what stands for 0 in each of its rows, 0."""
    rows = x.float()
    largest = rows.abs().amax(-1, keepdim=True)  # 0 for a vector of zeros: so is its product, whatever its x8
    x8 = torch.addcmul(ROUND, rows, LARGEST / largest).to(torch.uint8)  # which cuts off: the half in ROUND rounds
    y = _cpu_product(x8, weight, w_scale, w_zeros).mul_(largest)
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _cpu_product(x8, weight, w_scale, w_zeros):
    """(x8 - 128) W^T times the scales of W's rows. x8 (..., K) uint8, weight packed -> (..., N) fp32."""
    return torch.ops.onednn.qlinear_pointwise(x8, 1.0, X_ZERO, weight, w_scale, w_zeros, None, 1.0, 0, torch.float32,
                                              'none', [], '')


def _zeros(w_scale):
    return torch.zeros_like(w_scale, dtype=torch.int64)


@functools.cache
def has_cpu_product() -> bool:
    """Whether this PyTorch has the product, and this CPU its sums: without VNNI they may overflow."""
    weight = torch.full((32, 64), 127, dtype=torch.int8)
    x8 = torch.full((2, 64), 255, dtype=torch.uint8)
    try:
        y = _cpu_product(x8, torch.ops.onednn.qlinear_prepack(weight, None), torch.ones(32), _zeros(torch.ones(32)))
    except (AttributeError, RuntimeError):
        return False
    return bool((y == 64 * 127 * 127).all())


def _plain_linear(weight, w_scale, bias, x):
    """x (..., K) -> (..., N), with PyTorch's plain operators: the bytes are saved, the time is not."""
    y = F.linear(x, weight.to(x.dtype)) * w_scale  # in fp32: a scale in bf16 would be off by up to 0.2%
    return (y if bias is None else y + bias).to(x.dtype)


def _gpu_linear(weight, w_scale, bias, x):
    """x (..., K) -> (..., N), in the dtype of x; many rows by `_plain_linear`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MAX_ROWS or x.dtype == torch.float64:
        return _plain_linear(weight, w_scale, bias, x)
    return _gpu_product(rows, weight, w_scale, bias).view(*x.shape[:-1], len(weight))


def _gpu_product(x, weight, w_scale, bias):
    """x (M, K), weight (N, K) int8, w_scale and bias (N,) or None -> (M, N) in the dtype of x."""
    (M, K), N = x.shape, len(weight)
    x, y = x.contiguous(), x.new_empty(M, N)
    rows = max(16, triton.next_power_of_2(M))  # tensor cores multiply 16 at least
    grid = triton.cdiv(N, 32),  # few weights a program: a small layer has work for all multiprocessors
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _int8_product_kernel[grid](x, weight, w_scale, bias, y, M, N, K, rows, 32, 128, num_warps=4, num_stages=4)
    return y


@jit
def _int8_product_kernel(x, weight, w_scale, bias, y, M, N, K, ROWS: constexpr, OUTPUTS: constexpr, STEP: constexpr):
    """OUTPUTS columns of y: their rows of the weight are read once, for all rows of x."""
    n, m, at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, STEP)
    w_rows, x_rows = weight + n[:, None].to(tl.int64) * K, x + m[None, :] * K
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for k in range(0, K, STEP):
        w = tl.load(w_rows + (k + at)[None, :], mask=(n < N)[:, None] & (k + at < K)[None, :], other=0)
        x_part = tl.load(x_rows + (k + at)[:, None], mask=(m < M)[None, :] & (k + at < K)[:, None], other=0.0)
        sums = tl.dot(w.to(x_part.dtype), x_part, sums, input_precision='ieee')
    sums *= tl.load(w_scale + n, mask=n < N, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + n, mask=n < N, other=0.0)[:, None].to(tl.float32)
    tl.store(y + m[None, :] * N + n[:, None], sums.to(y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@functools.cache
def has_gpu_product(device) -> bool:
    """Whether the Triton kernel is there and right on this GPU; a line on stderr says where it is wrong."""
    if triton is None:
        return False
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(5, 200, device=device, generator=generator)
    weight, w_scale = int8_rows(torch.randn(70, 200, device=device, generator=generator))
    for dtype in torch.float32, torch.bfloat16:
        want = _plain_linear(weight, w_scale.double(), None, x.to(dtype).double())
        try:
            off = ((_gpu_product(x.to(dtype), weight, w_scale, None) - want).norm() / want.norm()).item()
            wrong = None if off < 0.01 else f'differs from its definition by {off:.1%}'
        except Exception as error:  # of Triton's compiler, for one
            wrong = f'fails ({type(error).__name__})'
        if wrong:
            print(f"int8: Triton's product {wrong} in {str(dtype)[6:]}. Plain operators run instead, slower. Please "
                  'report this line', file=sys.stderr)
            return False
    return True
