"""The gated delta rule over chunks of tokens, in matrix products: the fast form of `Block.loop` in model_gdn.py.

A step is M_t = a_t M_{t-1} + k_t u_t^T with u_t = b_t (v_t - a_t M_{t-1}^T k_t), where M is the paper's S^T, a the
decay alpha and b is beta. Let g_t be the product of the decays of a chunk's tokens up to t, and M_0 the memory before
the chunk. Then M_{t-1} is a sum over the tokens i before t, and the writes u of a chunk solve a triangular system:

    M_t = g_t M_0 + sum_{i <= t} g_t / g_i k_i u_i^T            u_t + b_t sum_{i < t} g_t / g_i (k_t k_i) u_i
                                                                            = b_t v_t - b_t g_t M_0^T k_t

      I + A                   U     =  b V   -   b g K  M_0      so    U = U~ - W M_0  with  U~ = (I + A)^-1 (b V)
    [ 1                 ]   [ u_1 ]                                                          W  = (I + A)^-1 (b g K)
    [ b k_2 k_1 g  1    ]   [ u_2 ]
    [ ...   ...   ... 1 ]   [ ... ]    the WY form (paper, section 3.3). The chunk reads  g Q M_0 + (Q K^T g_t / g_i) U

U~, W, Q K^T and the reads are computed for all chunks at once; only M_0 goes from chunk to chunk. Where a document
starts between i and t, g_t / g_i is 0.
"""
import importlib.util

import torch
import torch.nn.functional as F

from attn_kernels import outside_graphs

PIN = '050bd26cc86f8284'


def implements(module):
    """The parts of model_gdn.py that are re-implemented here."""
    return module.read, module.Block.step, module.Block.empty_memory, module.Block.loop, module.Block._segment


def scan_chunks(memory, tokens, is_doc_start, active, chunk_len):
    """`Block.loop` of model_gdn.py, chunk_len tokens at a time (rounded up to a power of 2).

    memory (B, H, K, D); tokens: q, k (B, n, H, K), v (B, n, H, D), log_decay and beta (B, n, H); is_doc_start, active
    (B, n) bool or None. Returns what is read (B, n, H, D), undefined at inactive tokens, and the last memory.
    """
    q, k, v, log_decay, beta = tokens
    n = q.shape[1]
    C = 1 << (min(chunk_len, n) - 1).bit_length()
    n_chunks = -(-n // C)

    def cut(x):  # (B, n, H, ...) -> (B, n_chunks, C, H, ...); the zeros that fill up the last chunk change nothing
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, n_chunks * C - n)).unflatten(1, (n_chunks, C))

    def chunks(x):  # (B, n, H, ...) -> (n_chunks, B, H, C, ...)
        return cut(x).movedim(1, 0).movedim(3, 2)

    if active is not None:  # no decay and no write
        log_decay, beta = (x.masked_fill(~active.unsqueeze(-1), 0) for x in (log_decay, beta))
    # cumsum before the axes move: its gradient is then contiguous, as PyTorch 2.13's compiler takes softplus' to be
    log_g = cut(log_decay).cumsum(2).movedim(1, 0).movedim(3, 2)
    q, k, v, beta = map(chunks, (q, k, v, beta.unsqueeze(-1)))
    is_seen, from_memory = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(), log_g.exp().unsqueeze(-1)  # g_t
    if is_doc_start is not None:
        starts = is_doc_start if active is None else is_doc_start & active
        document = chunks(starts.long().unsqueeze(-1)).cumsum(-1)  # (n_chunks, B, 1, C), 0: that of M_0
        is_seen = is_seen & (document.unsqueeze(-1) == document.unsqueeze(-2))
        from_memory = from_memory * (document == 0).unsqueeze(-1)
    # g_t / g_i; masked before exp, which could be inf for i > t
    between = (log_g.unsqueeze(-1) - log_g.unsqueeze(-2)).masked_fill(~is_seen, float('-inf')).exp()

    A = (beta * (k @ k.transpose(-1, -2)) * between).tril(-1)
    u, w = (inverse(A) @ torch.cat([beta * v, beta * from_memory * k], -1)).split([v.shape[-1], k.shape[-1]], -1)
    k_to_end = k * between[..., -1, :].unsqueeze(-1)
    before, written, memory = walk(memory, u, w, k_to_end, from_memory[..., -1:, :])
    reads = (q * from_memory) @ before + (q @ k.transpose(-1, -2) * between) @ written
    return reads.movedim(0, 1).movedim(2, 3).flatten(1, 2)[:, :n], memory


@outside_graphs  # a compiler would unroll all chunks
def walk(memory, u, w, k_to_end, decay):
    """From chunk to chunk: returns M_0 and U of each chunk, (n_chunks, B, H, ...), and the last memory (B, H, K, D)."""
    heads, before, written = memory.shape[:2], [], []
    m = memory.flatten(0, 1)
    for u_i, w_i, k_i, decay_i in zip(*(x.flatten(1, 2) for x in (u, w, k_to_end, decay))):
        before.append(m)
        written.append(torch.baddbmm(u_i, w_i, m, alpha=-1))  # U~ - W M_0
        m = torch.baddbmm(decay_i * m, k_i.mT, written[-1])
    return *(torch.stack(x).unflatten(1, heads) for x in (before, written)), m.unflatten(0, heads)


def inverse(A):
    """(I + A)^-1 for strictly lower triangular A (..., C, C), C a power of 2, in log2(C) batched steps:

        [ a    ]^-1     [  a^-1              ]
        [ c  b ]     =  [ -b^-1 c a^-1  b^-1 ]

    The powers of A in a Neumann series would be as many products, and overflow where keys repeat.
    """
    half = A.shape[-1] // 2
    if half == 0:
        return torch.ones_like(A)
    a, b = inverse(torch.stack([A[..., :half, :half], A[..., half:, half:]]))
    corner = -b @ A[..., half:, :half] @ a
    return torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([corner, b], -1)], -2)


def import_fla():
    """Return `scan_fla`. Raises ValueError where the package fla-core is not installed."""
    if importlib.util.find_spec('fla') is None:
        raise ValueError("scan = 'fla' needs the package fla-core: pip install fla-core, or use scan = 'auto'")
    return scan_fla


def scan_fla(memory, tokens, is_doc_start, active, chunk_len):
    """`scan_chunks` by the GPU kernel of flash-linear-attention in training; the memory is empty there.

    Its products are in bf16. Evaluation and decoding, which have no gradients, run `scan_chunks`.
    """
    if not torch.is_grad_enabled():
        return scan_chunks(memory, tokens, is_doc_start, active, chunk_len)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    q, k, v, log_decay, beta = tokens
    tokens, cu_seqlens = [q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, beta], None
    if is_doc_start is not None:  # all documents are joined into one row, with the indices where each starts
        starts = is_doc_start.index_fill(1, torch.zeros(1, dtype=torch.int64, device=q.device), True)
        cu_seqlens = F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=starts.numel())
        tokens = [x.flatten(0, 1).unsqueeze(0) for x in tokens]
    reads, _ = chunk_gated_delta_rule(*tokens, scale=1.0, cu_seqlens=cu_seqlens)
    return reads.view(v.shape).to(v.dtype), None
