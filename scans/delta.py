"""The gated delta rule on a GPU: `delta_rule` of model_gpn.py, one write and one read of a memory.

As plain PyTorch, it is several kernels, and each moves the memory M, most of the bytes of a step.
Here, the forward is one kernel that reads and writes M once. The backward is one that reads M and
the gradient of the new M, and writes that of M. Both compute in the dtype of their inputs.

scans/recurrent.py keeps each token's read and passes it back as `known`. So its backward pass
writes M only to rebuild it: the gradient needs no second forward.

`fast_on_gpu` pins them to the code that they compute. After an edit of it, change both kernels,
then run `pytest tests/scans/test_delta.py`. It compares them, and shows the digest for PINS.

    B  batch size   H  heads   K  key size   D  value size   BH  B H, heads of all rows
"""
import functools

import torch
from torch.overrides import wrap_torch_function

from . import constexpr, digest, jit, kernels_on_cpu, tl, triton, warn_once

PINS = {'5c5bdbd2fb554561'}  # digests of `delta_rule` and what it calls
COLUMNS, WARPS = 32, 4  # columns of M (value dimensions) that a program computes at a time


@jit
def _key_of(x, row, K: constexpr):
    """Return the key (K,), a mask of the entries that pass the ReLU, and 1 / the ReLU's length."""
    x = tl.load(x + row, mask=row < K, other=0.0)
    x = tl.where(x < 0, 0.0, x)  # keeps NaN
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) + 1e-12)  # eps ** 2 of `l2_normalize`
    return x * inverse, x > 0, inverse


@jit
def _forward_kernel(memory, k, v, beta, decay, q, new, read, K: constexpr, D: constexpr, ROWS: constexpr,
                    COLUMNS: constexpr):
    """Compute some columns of a head. memory, new: (BH, K, D); read: (BH, D), only with q."""
    head, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = head * K * D + row[:, None] * D + column[None, :]
    m = tl.load(memory + place, mask=seen, other=0.0)
    key, _, _ = _key_of(k + head * K, row, K)
    error = tl.load(v + head * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
    m = tl.load(decay + head) * m + key[:, None] * (tl.load(beta + head) * error)[None, :]
    tl.store(new + place, m, mask=seen)
    if q is not None:
        query, _, _ = _key_of(q + head * K, row, K)
        tl.store(read + head * D + column, tl.sum(m * query[:, None], 0), mask=column < D)


@jit
def _backward_kernel(grad, grad_read, memory, k, v, beta, decay, q, dm, dk, dv, dbeta, ddecay, dq, K: constexpr,
                     D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """Compute the gradients of a head: dm of memory, and so on. grad: that of the new memory.

    With e = v - m^T k, m' = decay m + beta k e^T and the read r = m'^T q, let gr be the gradient of
    r, and g that of m', including the read's share q gr^T. The gradients are
        q   m' gr = decay m gr + beta k (e . gr)   v      gv = beta g^T k   decay   <g, m>
        k   beta g e - m gv                        beta   k^T g e           m       decay g - k gv^T
    where k and q are the keys. Their gradients then pass through `key_of`.
    """
    head, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    key, key_passed, key_inverse = _key_of(k + head * K, row, K)
    query, query_passed, query_inverse = _key_of(q + head * K, row, K)
    b, d = tl.load(beta + head), tl.load(decay + head)
    g_e, m_gv, m_gr, g_m, e_gr = 0 * key, 0 * key, 0 * key, 0 * key, 0 * b  # sums over columns
    for start in range(0, D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        seen = (row < K)[:, None] & (column < D)[None, :]
        place = head * K * D + row[:, None] * D + column[None, :]
        m = tl.load(memory + place, mask=seen, other=0.0)
        gr = tl.load(grad_read + head * D + column, mask=column < D, other=0.0)
        g = tl.load(grad + place, mask=seen, other=0.0) + query[:, None] * gr[None, :]
        error = tl.load(v + head * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
        gv = b * tl.sum(g * key[:, None], 0)
        g_e += tl.sum(g * error[None, :], 1)
        m_gv += tl.sum(m * gv[None, :], 1)
        m_gr += tl.sum(m * gr[None, :], 1)
        g_m += tl.sum(g * m, 1)
        e_gr += tl.sum(error * gr, 0)
        tl.store(dv + head * D + column, gv, mask=column < D)
        tl.store(dm + place, d * g - key[:, None] * gv[None, :], mask=seen)
    gk, gq = b * g_e - m_gv, d * m_gr + b * key * e_gr
    gk = tl.where(key_passed, (gk - key * tl.sum(gk * key, 0)) * key_inverse, 0.0)
    gq = tl.where(query_passed, (gq - query * tl.sum(gq * query, 0)) * query_inverse, 0.0)
    tl.store(dk + head * K + row, gk, mask=row < K)
    tl.store(dq + head * K + row, gq, mask=row < K)
    tl.store(dbeta + head, tl.sum(key * g_e, 0))
    tl.store(ddecay + head, tl.sum(g_m, 0))


def _launch(kernel, tiles, first, *others):
    B, H, K, D = first.shape
    tensors = (x if x is None else x.contiguous() for x in (first, *others))
    with torch.cuda.device_of(first):
        kernel[B * H, tiles](*tensors, K, D, triton.next_power_of_2(K), COLUMNS, num_warps=WARPS, num_stages=1)


# ---- operators ----

def forward(memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor,
            q: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new memory, and the read; without q, an empty tensor."""
    new, read = _empty_results(memory, k, v, beta, decay, q)
    _launch(_forward_kernel, triton.cdiv(memory.shape[3], COLUMNS), memory, k, v, beta, decay, q, new, read)
    return new, read


def backward(grad: torch.Tensor, grad_read: torch.Tensor, memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             beta: torch.Tensor, decay: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of memory, k, v, beta, decay and q."""
    grads = _empty_gradients(grad, grad_read, memory, k, v, beta, decay, q)
    _launch(_backward_kernel, 1, grad, grad_read, memory, k, v, beta, decay, q, *grads)
    return grads


def _empty_results(memory, k, v, beta, decay, q):
    new = torch.empty_like(memory, memory_format=torch.contiguous_format)
    return new, v.new_empty(v.shape if q is not None else 0)


def _empty_gradients(grad, grad_read, *inputs):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


_NAMESPACE = __name__.replace('.', '_')
_forward_op = torch.library.custom_op(f'{_NAMESPACE}::forward', forward, mutates_args=())
_forward_op.register_fake(_empty_results)
_backward_op = torch.library.custom_op(f'{_NAMESPACE}::backward', backward, mutates_args=())
_backward_op.register_fake(_empty_gradients)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, memory, k, v, beta, decay, q, known):
        ctx.save_for_backward(memory, k, v, beta, decay, q)
        new, read = _forward_op(memory, k, v, beta, decay, q if known is None else None)
        return new, read if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx, grad, grad_read):
        return *_backward_op(grad, grad_read, *ctx.saved_tensors), None


@wrap_torch_function(lambda memory, *others, **known: (memory,))  # by its first tensor, products.py sees the call
def kernels(memory, k, v, beta, decay, q, known=None):
    """Compute `delta_rule`. known: the read; then only the memory is computed."""
    return _DeltaRule.apply(memory, k, v, beta, decay, q, known)


kernels.keeps = True  # the read, see products.py


def _compute(rule, memory, *others):
    return kernels(memory, *others) if memory.is_cuda or kernels_on_cpu() else rule(memory, *others)


def fast_on_gpu(rule, *uses):
    """Return rule with these kernels on a GPU, or as it is, if its code is not what they compute.

    uses: functions of the model file that rule calls.
    """
    if triton is None:
        return rule
    try:
        found = digest(rule, *uses)
    except OSError:  # defined in an interpreter, so it has no file
        return rule
    if found in PINS:
        return functools.partial(_compute, rule)
    warn_once(f'{rule.__module__.rpartition(".")[2]}.{rule.__name__} was edited, so it runs on a GPU without '
              f'scans/delta.py. python -m pytest tests/scans/test_delta.py compares both: if they are equal, add '
              f'{found!r} to PINS in scans/delta.py')
    return rule
