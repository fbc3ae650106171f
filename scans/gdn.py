"""The gated delta rule in chunks of tokens: `Block.loop` of model_gdn.py, as matrix products.

A step is M_t = a_t M_{t-1} + k_t u_t^T with u_t = b_t (v_t - a_t M_{t-1}^T k_t). M is the paper's
S^T, a the decay alpha, b is beta. Let g_t be the product of a chunk's decays up to t, and M_0 the
memory before the chunk. Then M_t is a sum, and a chunk's writes u solve a triangular system:

    M_t = g_t M_0 + sum_{i <= t} g_t / g_i k_i u_i^T
    u_t + b_t sum_{i < t} g_t / g_i (k_t k_i) u_i = b_t v_t - b_t g_t M_0^T k_t

      I + A                               U    =  b V - b g K M_0   so    U  = U~ - W M_0
    [ 1                             ]  [ u_1 ]                      with  U~ = (I + A)^-1 (b V)
    [ b_2 (k_2 k_1) g_2/g_1  1      ]  [ u_2 ]                      and   W  = (I + A)^-1 (b g K)
    [ ...                    ...  1 ]  [ ... ]

This is the WY form (paper, section 3.3). The chunk's output is g Q M_0 + (Q K^T g_t / g_i) U. Only
M_0, and so U, needs a loop over chunks. Across a document start, g_t / g_i is 0.

In the code, u is U~, w is W, `written` is U, and C is the length of a chunk (elsewhere the width).
"""
import importlib.metadata
import importlib.util

import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from attn_kernels import outside_graphs

PINS = {'5d509124e0bf60df'}  # digests of what `implements` lists
SMALL = dict(n_layer=2, n_head=2, n_embd=24, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, chunk_len=4,
             eos_id=59)  # a model that uses every branch, for tests


def implements(module):
    """Return the parts of model_gdn.py that are re-implemented here."""
    return module.read, module.Block.step, module.Block.loop


def scan_chunks(memory, tokens, is_doc_start, active, chunk_len):
    """Compute `Block.loop` of model_gdn.py in chunks of chunk_len (rounded up to a power of 2).

    memory: (B, H, K, D); tokens: q, k (B, n, H, K), v (B, n, H, D), log_decay, beta (B, n, H);
    is_doc_start, active: (B, n) bool or None. Returns the outputs (B, n, H, D), undefined at
    inactive tokens, and the last memory.
    """
    q, k, v, log_decay, beta = tokens
    n = q.shape[1]
    C = 1 << (min(chunk_len, n) - 1).bit_length()
    n_chunks = -(-n // C)

    def split(x):  # (B, n, H, ...) -> (B, n_chunks, C, H, ...); the last chunk is padded with zeros
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, n_chunks * C - n)).unflatten(1, (n_chunks, C))

    def chunks(x):  # (B, n, H, ...) -> (n_chunks, B, H, C, ...)
        return split(x).movedim(1, 0).movedim(3, 2)

    if active is not None:  # inactive tokens neither decay nor write
        log_decay, beta = (x.masked_fill(~active.unsqueeze(-1), 0) for x in (log_decay, beta))
    # cumsum before moving axes, for a contiguous gradient: PyTorch 2.13's compiler assumes it is
    log_g = split(log_decay).cumsum(2).movedim(1, 0).movedim(3, 2)
    q, k, v, beta = map(chunks, (q, k, v, beta.unsqueeze(-1)))
    is_seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    from_memory = log_g.exp().unsqueeze(-1)  # g_t
    if is_doc_start is not None:
        starts = is_doc_start if active is None else is_doc_start & active
        document = chunks(starts.long().unsqueeze(-1)).cumsum(-1)  # (n_chunks, B, 1, C); 0: M_0's document
        is_seen = is_seen & (document.unsqueeze(-1) == document.unsqueeze(-2))
        from_memory = from_memory * (document == 0).unsqueeze(-1)
    # g_t / g_i; masked before exp, which could overflow for i > t
    between = (log_g.unsqueeze(-1) - log_g.unsqueeze(-2)).masked_fill(~is_seen, float('-inf')).exp()

    A = (beta * (k @ k.transpose(-1, -2)) * between).tril(-1)
    u, w = (inverse(A) @ torch.cat([beta * v, beta * from_memory * k], -1)).split([v.shape[-1], k.shape[-1]], -1)
    k_to_end = k * between[..., -1, :].unsqueeze(-1)
    before, written, memory = loop_chunks(memory, u, w, k_to_end, from_memory[..., -1:, :])
    reads = (q * from_memory) @ before + (q @ k.transpose(-1, -2) * between) @ written
    return reads.movedim(0, 1).movedim(2, 3).flatten(1, 2)[:, :n], memory


@outside_graphs  # the compiler would unroll all chunks
def loop_chunks(memory, u, w, k_to_end, decay):
    """Return M_0 and U of each chunk, (n_chunks, B, H, ...), and the last memory (B, H, K, D)."""
    heads, before, written = memory.shape[:2], [], []
    m = memory.flatten(0, 1)
    for u_i, w_i, k_i, decay_i in zip(*(x.flatten(1, 2) for x in (u, w, k_to_end, decay))):
        before.append(m)
        written.append(torch.baddbmm(u_i, w_i, m, alpha=-1))  # U~ - W M_0
        m = torch.baddbmm(decay_i * m, k_i.mT, written[-1])
    return *(torch.stack(x).unflatten(1, heads) for x in (before, written)), m.unflatten(0, heads)


def inverse(A):
    """Return (I + A)^-1 for strictly lower triangular A (..., C, C), C a power of 2.

        [ a    ]^-1     [  a^-1              ]
        [ c  b ]     =  [ -b^-1 c a^-1  b^-1 ]      log2(C) batched steps

    A Neumann series needs as many products, and its powers of A overflow if keys repeat.
    """
    half = A.shape[-1] // 2
    if half == 0:
        return torch.ones_like(A)
    a, b = inverse(torch.stack([A[..., :half, :half], A[..., half:, half:]]))
    corner = -b @ A[..., half:, :half] @ a
    return torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([corner, b], -1)], -2)


def import_fla():
    """Return `scan_fla`. Raises ValueError without fla-core, a GPU or a Triton that is right."""
    if importlib.util.find_spec('fla') is None or not torch.cuda.is_available():
        raise ValueError("scan = 'fla' needs the package fla-core (pip install fla-core) and a GPU: use scan = 'auto'")
    triton = TorchVersion(importlib.metadata.version('triton'))
    if torch.cuda.get_device_capability()[0] == 9 and '3.4' <= triton < '3.7.1':  # fla would raise, later
        raise ValueError("scan = 'fla' gives wrong gradients on Hopper GPUs with Triton from 3.4 to below 3.7.1, and "
                         f"this is {triton}: use scan = 'auto'")
    return scan_fla


def scan_fla(memory, tokens, is_doc_start, active, chunk_len):
    """Run `scan_chunks` with flash-linear-attention's GPU kernel, for training (empty memory).

    Its products are in bf16. Without gradients (evaluation, decoding), it calls `scan_chunks`.
    """
    if not torch.is_grad_enabled():
        return scan_chunks(memory, tokens, is_doc_start, active, chunk_len)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    q, k, v, log_decay, beta = tokens
    tokens, cu_seqlens = [q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, beta], None
    if is_doc_start is not None:  # one row of all documents, and the indices where they start
        starts = is_doc_start.index_fill(1, torch.zeros(1, dtype=torch.int64, device=q.device), True)
        cu_seqlens = F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=starts.numel())
        tokens = [x.flatten(0, 1).unsqueeze(0) for x in tokens]
    reads, _ = chunk_gated_delta_rule(*tokens, scale=1.0, cu_seqlens=cu_seqlens)
    return reads.view(v.shape).to(v.dtype), None
