"""The gated delta rule: a memory of H heads that is written and read once a token.

    error = v - M^T k        M' = decay M + beta k error^T        read = M'^T q

Columns of M (the values' dimensions) never meet, so a Triton program takes some of them and all rows, and a step is one
pass over M. On CPU it is part of gpn.c, or PyTorch's operators.
"""
import torch

import attn_kernels
from attn_kernels import constexpr, jit, tl, triton


def use_triton(x):
    """Whether the Triton kernels run for this tensor."""
    wanted = triton is not None and not attn_kernels.REFERENCE and (x.is_cuda or attn_kernels.KERNELS_ON_CPU)
    return wanted and x.dtype != torch.float64 and x.numel() > 0


def delta_step_reference(memory, k, v, decay, beta, q, carry_mask=None):
    """`delta_step` as its definition; returns the new memory besides, and leaves the old as it was."""
    if carry_mask is not None:
        memory = memory * carry_mask[..., None, None]
    error = v - torch.einsum('bhkd,bhk->bhd', memory, k)
    memory = decay[..., None, None] * memory + beta[..., None, None] * torch.einsum('bhk,bhd->bhkd', k, error)
    return memory, torch.einsum('bhkd,bhk->bhd', memory, q)


def delta_step(memory, k, v, decay, beta, q, carry_mask=None):
    """Writes to the memory, in place, and reads from it: the gated delta rule (GPN paper, eq. 10).

    memory (B, H, K, D); k, q (B, H, K); v (B, H, D); decay, beta (B, H); carry_mask (B, 1), 0 in rows whose memory is
    emptied first. Returns what q reads (B, H, D).
    """
    if use_triton(memory):
        read = v.new_empty(v.shape)
        _delta_steps_in_triton(memory, memory, k, v, decay, beta, q, read, carry_mask, 1)
        return read
    if carry_mask is not None:
        memory.mul_(carry_mask[..., None, None])
    _write(memory, k, v, decay, beta, memory)
    return rows_times(q, memory)


def rows_times(x, m):
    """x^T m of each head. x (B, H, n), m (B, H, n, p) -> (B, H, p). For m x give m transposed: faster on CPUs."""
    return torch.bmm(x.reshape(-1, 1, x.shape[-1]), m.flatten(0, 1)).view(*x.shape[:2], -1)


def _write(memory, k, v, decay, beta, out):
    error = v - rows_times(k, memory)
    torch.mul(memory, decay[..., None, None], out=out)
    out.addcmul_((k * beta.unsqueeze(-1)).unsqueeze(-1), error.unsqueeze(-2))


def delta_replay(memory, k, v, decay, beta, carry_mask=None):
    """The memories before, between and after S steps: everything as in `delta_step` with an axis S in front of all but
    memory.

    Returns (S + 1, B, H, K, D), the first of them `memory`.
    """
    S = len(k)
    memories = memory.new_empty(S + 1, *memory.shape)
    memories[0] = memory
    if use_triton(memory):
        _delta_steps_in_triton(memory, memories[1:], k, v, decay, beta, None, None, carry_mask, S)
        return memories
    for t in range(S):
        before = memories[t] if carry_mask is None else memories[t] * carry_mask[t, :, :, None, None]
        _write(before, k[t], v[t], decay[t], beta[t], memories[t + 1])
    return memories


def delta_step_backward(grad, memory, k, v, decay, beta, q, grad_read, carry_mask=None):
    """The gradient of `delta_step`. grad (B, H, K, D), of the memory after it, becomes that of the memory before it, in
    place.

    memory: before the step; grad_read (B, H, D): of what was read. Returns the gradients of q, k, v, beta and
    log(decay).
    """
    if use_triton(memory):
        return _delta_backward_in_triton(grad, memory, k, v, decay, beta, q, grad_read, carry_mask)
    if carry_mask is not None:
        memory = memory * carry_mask[..., None, None]
    grad.addcmul_(q.unsqueeze(-1), grad_read.unsqueeze(-2))
    error, b, memory_T = v - rows_times(k, memory), beta.unsqueeze(-1), memory.transpose(-1, -2)
    to_key, grad_v = rows_times(error, grad.transpose(-1, -2)), rows_times(k, grad) * b
    grad_beta = (k * to_key).sum(-1)
    # read = M'^T q with M' = decay M + beta k error^T
    through_error = (error * grad_read).sum(-1, keepdim=True)
    grad_q = torch.addcmul(decay.unsqueeze(-1) * rows_times(grad_read, memory_T), b * k, through_error)
    grad_k = torch.addcmul(rows_times(grad_v, memory_T), b, to_key, value=-1).neg_()
    grad_log = (grad * memory).sum((-1, -2)) * decay
    grad.mul_(decay[..., None, None]).addcmul_(k.unsqueeze(-1), grad_v.unsqueeze(-2), value=-1)
    if carry_mask is not None:
        grad.mul_(carry_mask[..., None, None])
    return grad_q, grad_k, grad_v, grad_beta, grad_log


@jit
def _delta_steps_kernel(memory, out, k, v, decay, beta, q, read, carry_mask, S, BH, H, D, K: constexpr, ROWS: constexpr,
                        N: constexpr):
    """S steps of N columns of one head.

    memory (BH, K, D); out (S, BH, K, D); k, q (S, BH, K); v, read (S, BH, D); decay, beta (S, BH).
    """
    head, row, column = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.program_id(1) * N + tl.arange(0, N)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    m = tl.load(memory + head * K * D + place, mask=seen, other=0.0)
    for t in range(0, S):
        i = t * BH + head
        if carry_mask is not None:
            m *= tl.load(carry_mask + i // H)
        key = tl.load(k + i * K + row, mask=row < K, other=0.0)
        error = tl.load(v + i * D + column, mask=column < D, other=0.0) - tl.sum(m * key[:, None], 0)
        m = m * tl.load(decay + i) + (key * tl.load(beta + i))[:, None] * error[None, :]
        tl.store(out + i * K * D + place, m, mask=seen)
        if q is not None:
            query = tl.load(q + i * K + row, mask=row < K, other=0.0)
            tl.store(read + i * D + column, tl.sum(m * query[:, None], 0), mask=column < D)


@jit
def _delta_backward_kernel(grad, memory, k, v, decay, beta, q, grad_read, carry_mask, shares, grad_v, scalars, BH, H, D,
                           K: constexpr, ROWS: constexpr, N: constexpr):
    """One step back, N columns of one head: their share of the gradients of q and k, shares (tiles, 2, BH, K), and of
    beta and log(decay), scalars (tiles, 2, BH); grad (BH, K, D) in place; grad_v (BH, D)."""
    head, tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROWS)
    column = tile * N + tl.arange(0, N)
    seen = (row < K)[:, None] & (column < D)[None, :]
    place = head * K * D + row[:, None] * D + column[None, :]
    carries = 1.0
    if carry_mask is not None:
        carries = tl.load(carry_mask + head // H)
    m = tl.load(memory + place, mask=seen, other=0.0) * carries
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
    tl.store(grad + place, carries * (a * g - key[:, None] * gv[None, :]), mask=seen)


DELTA_COLUMNS, DELTA_WARPS = 32, 4  # of a program


def _delta_steps_in_triton(memory, out, k, v, decay, beta, q, read, carry_mask, S):
    B, H, K, D = memory.shape
    grid = B * H, triton.cdiv(D, DELTA_COLUMNS)
    k, v, decay, beta, q, carry_mask = (x if x is None else x.contiguous() for x in (k, v, decay, beta, q, carry_mask))
    with torch.cuda.device_of(memory):
        _delta_steps_kernel[grid](memory, out, k, v, decay, beta, q, read, carry_mask, S, B * H, H, D, K,
                                  triton.next_power_of_2(K), DELTA_COLUMNS, num_warps=DELTA_WARPS, num_stages=1)


def _delta_backward_in_triton(grad, memory, k, v, decay, beta, q, grad_read, carry_mask):
    B, H, K, D = memory.shape
    tiles = triton.cdiv(D, DELTA_COLUMNS)
    shares, scalars = memory.new_empty(tiles, 2, B, H, K), memory.new_empty(tiles, 2, B, H)
    grad_v = v.new_empty(v.shape)
    tensors = (x if x is None else x.contiguous() for x in (k, v, decay, beta, q, grad_read, carry_mask))
    with torch.cuda.device_of(memory):
        _delta_backward_kernel[B * H, tiles](grad, memory, *tensors, shares, grad_v, scalars, B * H, H, D, K,
                                             triton.next_power_of_2(K), DELTA_COLUMNS, num_warps=DELTA_WARPS,
                                             num_stages=1)
    (grad_q, grad_k), (grad_beta, grad_log) = shares.sum(0), scalars.sum(0)
    return grad_q, grad_k, grad_v, grad_beta, grad_log
