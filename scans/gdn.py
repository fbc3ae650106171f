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

U~, W and Q K^T are made for all chunks at once; only M_0 goes from chunk to chunk. Where a document starts between i
and t, g_t / g_i is 0.
"""
import torch
import torch.nn.functional as F


@torch.compiler.disable  # PyTorch 2.13 compiles its backward to a view that fails: it runs between the graphs instead
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

    def chunks(x):  # (B, n, H, ...) -> (B, H, n_chunks, C, ...); zeros fill the last chunk: they change nothing
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, n_chunks * C - n))
        return x.unflatten(1, (n_chunks, C)).movedim(3, 1)

    if active is not None:  # no decay and no write
        log_decay, beta = (x.masked_fill(~active.unsqueeze(-1), 0) for x in (log_decay, beta))
    q, k, v, log_decay, beta = map(chunks, (q, k, v, log_decay, beta.unsqueeze(-1)))
    log_g = log_decay.cumsum(-1)
    is_seen, from_memory = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(), log_g.exp().unsqueeze(-1)  # g_t
    if starts is not None:
        starts = starts if active is None else starts & active
        document = chunks(starts.long().unsqueeze(-1)).cumsum(-1)  # (B, 1, n_chunks, C), 0: that of M_0
        is_seen = is_seen & (document.unsqueeze(-1) == document.unsqueeze(-2))
        from_memory = from_memory * (document == 0).unsqueeze(-1)
    # g_t / g_i; masked before exp, which could be inf for i > t
    between = (log_g.unsqueeze(-1) - log_g.unsqueeze(-2)).masked_fill(~is_seen, float('-inf')).exp()

    A = beta * (k @ k.transpose(-1, -2)) * between  # what is on or above the diagonal is not read
    u_and_w = torch.cat([beta * v, beta * from_memory * k], -1)
    u, w = torch.linalg.solve_triangular(A, u_and_w, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]],
                                                                                            -1)
    scores, q = q @ k.transpose(-1, -2) * between, q * from_memory
    k_to_end = (k * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2)
    carried, reads = from_memory[..., -1:, :], []
    # unbind, because the gradient of an index of each chunk would be as large as all chunks
    per_chunk = zip(*(x.unbind(2) for x in (q, k_to_end, u, w, scores, carried)))
    for q_i, k_i, u_i, w_i, scores_i, carried_i in per_chunk:
        written = u_i - w_i @ memory
        reads.append(q_i @ memory + scores_i @ written)
        memory = carried_i * memory + k_i @ written
    return torch.cat(reads, 2).movedim(1, 2)[:, :n], memory
