"""The gated delta rule over chunks of tokens, in matrix products: the fast form of `Model.loop` in model_gdn.py.

A step is M_t = a_t M_{t-1} + k_t u_t^T with u_t = b_t (v_t - a_t M_{t-1}^T k_t), where M is S^T of the paper, a the
decay alpha and b is beta. Let g_t be the product of the decays of a chunk's tokens up to t, and M_0 the memory before
the chunk. Then M_{t-1} is a sum over the tokens i before t, and the writes u of a chunk solve a triangular system:

    M_t = g_t M_0 + sum_{i <= t} g_t / g_i k_i u_i^T            u_t + b_t sum_{i < t} g_t / g_i (k_t k_i) u_i
                                                                            = b_t v_t - b_t g_t M_0^T k_t

        A                     U     =  b V   -   b g K  M_0      so    U = U~ - W M_0  with  U~ = A^-1 (b V)
    [ 1                 ]   [ u_1 ]                                                          W  = A^-1 (b g K)
    [ b k_2 k_1 g  1    ]   [ u_2 ]
    [ ...   ...   ... 1 ]   [ ... ]    the WY form (paper, section 3.3). The chunk reads  g Q M_0 + (Q K^T g_t / g_i) U

U~, W and Q K^T are made for all chunks at once, and so is what is read; only M_0 goes from chunk to chunk, in `walk`.
Its gradient is a walk back. On a GPU a walk is one Triton kernel, elsewhere PyTorch's operators. Where a document
starts between i and t, g_t / g_i is 0.
"""
import torch
import torch.nn.functional as F

from attn_kernels import constexpr, jit, tl, triton
from scans.delta_rule import use_triton


def scan_chunks(memory, q, k, v, log_decay, beta, starts, active, chunk_len):
    """`Model.loop` of model_gdn.py, chunk_len tokens at a time.

    memory (B, H, K, D); q, k (B, n, H, K); v (B, n, H, D); log_decay, beta (B, n, H); starts, active (B, n) bool, or
    None. Returns what is read (B, n, H, D), at inactive tokens nothing of meaning, and the last memory (B, H, K, D).
    """
    with torch.autocast(memory.device.type, enabled=False):  # in bf16 the sums would differ from the loop's
        return _scan_chunks(memory, q, k, v, log_decay, beta, starts, active, chunk_len)


def _scan_chunks(memory, q, k, v, log_decay, beta, starts, active, chunk_len):
    n, C = q.shape[1], min(chunk_len, q.shape[1])
    n_chunks = -(-n // C)

    def cut(x):  # (B, n, H, ...) -> (B, n_chunks, C, H, ...); zeros fill the last chunk: they change nothing
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, n_chunks * C - n)).unflatten(1, (n_chunks, C))

    def chunks(x):  # (B, n, H, ...) -> (n_chunks, B, H, C, ...)
        return cut(x).movedim(1, 0).movedim(3, 2)

    if active is not None:  # no decay and no write
        log_decay, beta = (x.masked_fill(~active.unsqueeze(-1), 0) for x in (log_decay, beta))
    # cumsum before the axes move: its gradient is then contiguous, as PyTorch 2.13's compiler takes softplus' to be
    log_g = cut(log_decay).cumsum(2).movedim(1, 0).movedim(3, 2)
    q, k, v, beta = map(chunks, (q, k, v, beta.unsqueeze(-1)))
    is_seen, from_memory = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(), log_g.exp().unsqueeze(-1)  # g_t
    if starts is not None:
        starts = starts if active is None else starts & active
        document = chunks(starts.long().unsqueeze(-1)).cumsum(-1)  # (n_chunks, B, 1, C), 0: that of M_0
        is_seen = is_seen & (document.unsqueeze(-1) == document.unsqueeze(-2))
        from_memory = from_memory * (document == 0).unsqueeze(-1)
    # g_t / g_i; masked before exp, which could be inf for i > t
    between = (log_g.unsqueeze(-1) - log_g.unsqueeze(-2)).masked_fill(~is_seen, float('-inf')).exp()

    A = beta * (k @ k.transpose(-1, -2)) * between  # what is on or above the diagonal is not read
    u_and_w = torch.cat([beta * v, -beta * from_memory * k], -1)  # -W, as it is added
    u, w = torch.linalg.solve_triangular(A, u_and_w, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]],
                                                                                            -1)
    scores, k_to_end = q @ k.transpose(-1, -2) * between, k * between[..., -1, :].unsqueeze(-1)
    before, written, memory = walk(memory, w, k_to_end, u, from_memory[..., -1, 0])
    reads = (q * from_memory) @ before + scores @ written
    return reads.movedim(0, 1).movedim(2, 3).flatten(1, 2)[:, :n], memory


# ---- the walk over chunks ----

@torch.library.custom_op('scans_gdn::walk', mutates_args=())  # so that a compiler sees one operator, not n_chunks steps
def walk(memory: torch.Tensor, left: torch.Tensor, right: torch.Tensor, add: torch.Tensor, carried: torch.Tensor,
         add_to_memory: torch.Tensor | None = None,
         is_back: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunk after chunk, with is_back from the last to the first: X = add + left M, then M = carried M + right^T X.

    memory (B, H, K, D), the first M; left, right (n_chunks, B, H, C, K); add (n_chunks, B, H, C, D); carried (n_chunks,
    B, H); add_to_memory (n_chunks, B, H, K, D) or None, added to M after its chunk. Returns M before each chunk
    (n_chunks, B, H, K, D), X (n_chunks, B, H, C, D) and the last M.
    """
    before, written, last = _empty_results(memory, add)
    if use_triton(memory) and fits_kernel(memory, add):
        _walk_in_triton(memory, left, right, add, carried, add_to_memory, before, written, last, is_back)
        return before, written, last
    order = [*range(len(add))][::-1 if is_back else 1]
    before[order[0]] = memory
    for i, after in zip(order, [*(before[j] for j in order[1:]), last]):
        m, x, left_i, right_i = (y[i].flatten(0, 1) for y in (before, written, left, right))
        torch.baddbmm(add[i].flatten(0, 1), left_i, m, out=x)
        torch.mul(before[i], carried[i, :, :, None, None], out=after)
        after.flatten(0, 1).baddbmm_(right_i.mT, x)
        if add_to_memory is not None:
            after += add_to_memory[i]
    return before, written, last


def _empty_results(memory, add):
    return memory.new_empty(len(add), *memory.shape), add.new_empty(add.shape), memory.new_empty(memory.shape)


@walk.register_fake
def _(memory, left, right, add, carried, add_to_memory=None, is_back=False):
    return _empty_results(memory, add)


def _save_for_backward(ctx, inputs, output):
    _, left, right, _, carried, _, _ = inputs
    before, written, _ = output
    ctx.save_for_backward(left, right, carried, before, written)


def _walk_backward(ctx, grad_before, grad_written, grad_last):
    """The gradient is a walk back. The gradients of left, right and carried are products of all chunks at once.

    dX_i = its own + right_i dM_{i+1}        dM_i = its own + carried_i dM_{i+1} + left_i^T dX_i
    """
    left, right, carried, before, written = ctx.saved_tensors
    grad_after, grad_add, grad_memory = walk(grad_last, right, left, grad_written, carried, grad_before, True)
    with torch.autocast(left.device.type, enabled=False):
        grad_left, grad_right = grad_add @ before.mT, written @ grad_after.mT
    return grad_memory, grad_left, grad_right, grad_add, (grad_after * before).sum((-1, -2)), None, None


walk.register_autograd(_walk_backward, setup_context=_save_for_backward)


@jit
def _walk_kernel(memory, left, right, add, carried, add_to_memory, before, written, last, n_chunks, BH, D,
                 C: constexpr, K: constexpr, TOKENS: constexpr, HALF: constexpr, N: constexpr, BACK: constexpr):
    """`walk` of N columns of one head, M in registers. Columns of M never meet, so that no program waits for another.

    All tensors contiguous, heads (B, H) flattened. TOKENS: C filled up to a power of 2. M is held as its upper and its
    lower HALF rows: a product with both would need more registers than there are. tf32x3: three products on tensor
    cores that are together as exact as one in fp32.
    """
    head, token, row = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS), tl.arange(0, HALF)
    column = tl.program_id(1) * N + tl.arange(0, N)
    in_chunk, of_chunk = (token < C)[:, None] & (column < D)[None, :], token[:, None] * D + column[None, :]
    in_upper, in_lower = (row < K)[:, None] & (column < D)[None, :], (HALF + row < K)[:, None] & (column < D)[None, :]
    of_upper, of_lower = row[:, None] * D + column[None, :], (HALF + row)[:, None] * D + column[None, :]
    seen, of_keys = (token < C)[:, None], token[:, None] * K + row[None, :]
    upper = tl.load(memory + head * K * D + of_upper, mask=in_upper, other=0.0)
    lower = tl.load(memory + head * K * D + of_lower, mask=in_lower, other=0.0)
    for j in range(0, n_chunks):
        i = n_chunks - 1 - j if BACK else j
        chunk = i * BH + head
        tl.store(before + chunk * K * D + of_upper, upper, mask=in_upper)
        tl.store(before + chunk * K * D + of_lower, lower, mask=in_lower)
        x = tl.load(add + chunk * C * D + of_chunk, mask=in_chunk, other=0.0)
        keys = tl.load(left + chunk * C * K + of_keys, mask=seen & (row < K)[None, :], other=0.0)
        x = tl.dot(keys, upper, x, input_precision='tf32x3')
        keys = tl.load(left + chunk * C * K + HALF + of_keys, mask=seen & (HALF + row < K)[None, :], other=0.0)
        x = tl.dot(keys, lower, x, input_precision='tf32x3')
        tl.store(written + chunk * C * D + of_chunk, x, mask=in_chunk)
        decay = tl.load(carried + chunk)
        keys = tl.load(right + chunk * C * K + of_keys, mask=seen & (row < K)[None, :], other=0.0)
        upper = tl.dot(tl.trans(keys), x, upper * decay, input_precision='tf32x3')
        keys = tl.load(right + chunk * C * K + HALF + of_keys, mask=seen & (HALF + row < K)[None, :], other=0.0)
        lower = tl.dot(tl.trans(keys), x, lower * decay, input_precision='tf32x3')
        if add_to_memory is not None:
            upper += tl.load(add_to_memory + chunk * K * D + of_upper, mask=in_upper, other=0.0)
            lower += tl.load(add_to_memory + chunk * K * D + of_lower, mask=in_lower, other=0.0)
    tl.store(last + head * K * D + of_upper, upper, mask=in_upper)
    tl.store(last + head * K * D + of_lower, lower, mask=in_lower)


WALK_COLUMNS, WALK_WARPS = 16, 4  # of a program; with 32 columns keys of 64 spill on sm_90


def fits_kernel(memory, add):
    """Whether a program's share of the memory and a chunk's keys fit a multiprocessor."""
    return memory.shape[2] <= 128 and add.shape[3] <= 64


def _walk_in_triton(memory, left, right, add, carried, add_to_memory, before, written, last, is_back):
    (B, H, K, D), n_chunks, C = memory.shape, len(add), add.shape[3]
    tensors = (x if x is None else x.contiguous() for x in (memory, left, right, add, carried, add_to_memory))
    tokens, half = (max(16, triton.next_power_of_2(size)) for size in (C, -(-K // 2)))  # 16 of each in a product
    with torch.cuda.device_of(memory):
        _walk_kernel[B * H, triton.cdiv(D, WALK_COLUMNS)](
            *tensors, before, written, last, n_chunks, B * H, D, C, K, tokens, half, WALK_COLUMNS, is_back,
            num_warps=WALK_WARPS, num_stages=1)
