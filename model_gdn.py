"""Gated DeltaNet ("Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464).

A Transformer with a matrix memory of fixed size in place of attention. For each token the memory decays, is read with
the token's key, and the difference from the token's value is written back: the gated delta rule. Queries, keys and
values first pass through a short causal convolution. It is the second baseline of the GPN paper (arXiv 2605.10643).

Read `Block.step`, the equation of the memory, then `Block.forward`. `Block.loop` repeats the step for each token, which
is all that training, evaluation and decoding need. scans/gdn.py computes the same function by matrix products over
chunks of tokens and is used as long as the equation is unchanged. `extend` and `Cache` are for decoding.

    B  batch     T  positions    C  width, n_embd    V  vocabulary rows, padded    F  feed-forward width, n_ffn
    L  layers    H  heads        K  d_k, key size    D  d_v, value size            W  taps of the convolution
    M  memory (B, H, K, D), the transpose of the paper's S                         X  convolved channels, H (2 K + D)
    h  a token's vector          n  positions of one `extend` call
    is_doc_start  True for tokens after the end of a document: their memory starts empty
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import at_least_fp32, checkpointed, chunked_loss, mask_padding, outside_graphs

try:
    from scans import gdn, pinned
except ModuleNotFoundError:  # the folder is optional
    gdn = pinned = None


@dataclass
class Config:
    n_layer: int = 10  # blocks, L (GPN paper, table 1)
    n_head: int = 6  # heads of the memory, H (inferred: 1,966,080 numbers of state in that table)
    n_embd: int = 768  # width of the residual stream, C
    d_k: int = 128  # size of a head's keys, K (inferred, as n_head)
    d_v: int = 256  # size of a head's values, D (inferred, as n_head; twice d_k in the official code)
    n_ffn: int | None = None  # feed-forward width, F; None: 23/12 n_embd in whole 32s (inferred: 1472 at 768 is 130M)
    conv_size: int = 4  # taps of the short convolution, W, at least 2: the token itself and those before it
    chunk_len: int = 64  # tokens per chunk of the fast form, rounded up to a power of 2, and per segment of the loop
    scan: Literal['auto', 'loop', 'fast', 'fla'] = 'auto'  # auto: scans/gdn.py if the equation is unchanged, else loop
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    norm_eps: float = 1e-6  # epsilon of RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial matrices and convolutions, without the head's (fla)
    vocab_size: int = 32000  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 32000  # number of token ids; rows from n_ids on are padding
    eos_id: int | None = None  # the id that ends a document, after which memory and convolution start anew; None: never

    def __post_init__(self):
        if self.conv_size < 2:
            raise ValueError(f'conv_size = {self.conv_size}: expected at least 2 taps')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.n_ffn is None:
            self.n_ffn = max(1, round(23 / 12 * self.n_embd / 32)) * 32


def l2_normalize(x):
    """Scale x (..., K) to length 1. The 1e-6 under the root is the official code's."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def read(memory, x):
    """M^T x for each head: memory (B, H, K, D), x (B, H, K) -> (B, H, D). Autocast would make a matmul bf16."""
    return (memory * x.unsqueeze(-1)).sum(-2)


def short_convolution(x, weight, same_doc=None):
    """Causal convolution of each channel: y_t = sum over taps j of weight_j x_{t-W+1+j}.

    x: (B, W - 1 + n, X), starting with the W - 1 inputs before the n tokens; weight: (X, W); same_doc: (B, n, W), False
    for taps in another document, or None. Returns (B, n, X).
    """
    n, y = x.shape[1] - weight.shape[1] + 1, 0
    for j in range(weight.shape[1]):
        tap = weight[:, j] * x[:, j:j + n]
        y = y + (tap if same_doc is None else tap * same_doc[:, :, j:j + 1])
    return y


def document_masks(is_eos, conv_size):
    """Return same_doc (B, n, W) and is_doc_start (B, n) for is_eos (B, W - 1 + n), the W - 1 tokens before included."""
    document = F.pad(is_eos[:, :-1].long().cumsum(1), (1, 0))  # number of each token's document
    taps = document.unfold(1, conv_size, 1)
    return taps == taps[..., -1:], is_eos[:, conv_size - 2:-1]


class Block(nn.Module):
    """A layer with a matrix memory where a Transformer has attention, then a SwiGLU net (section 3.4 and figure 1)."""

    def __init__(self, config, layer, fast=None):
        super().__init__()
        c, C, H, K, D = config, config.n_embd, config.n_head, config.d_k, config.d_v
        self.layer, self.fast, self.chunk_len, self.checkpoints = layer, fast, c.chunk_len, c.checkpoint_blocks
        self.sizes, self.memory_shape = [H * K, H * K, H * D], (H, K, D)
        self.token_shapes = (H, K), (H, K), (H, D), (H,), (H,)  # q, k, v, log_decay and beta of `step`, for the cache
        self.memory_norm = nn.RMSNorm(C, c.norm_eps)
        self.qkv = nn.Linear(C, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.empty(sum(self.sizes), c.conv_size))
        self.beta = nn.Linear(C, H, bias=False)
        self.decay = nn.Linear(C, H, bias=False)
        rate = torch.empty(H).uniform_(0, 16).clamp(min=1e-8)
        self.log_rate = nn.Parameter(rate.log())  # A_log in the official code
        dt = torch.empty(H).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt
        self.read_gate = nn.Linear(C, H * D, bias=False)
        self.out_norm = nn.RMSNorm(D, c.norm_eps)  # of each head (official code)
        self.read_out = nn.Linear(H * D, C, bias=False)
        self.ffn_norm = nn.RMSNorm(C, c.norm_eps)
        self.gate_up = nn.Linear(C, 2 * c.n_ffn, bias=False)
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)

    def step(self, memory, q, k, v, log_decay, beta):
        """One token of the gated delta rule (section 3.1).

            S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t

        memory: (B, H, K, D), which is S^T; q, k: (B, H, K); v: (B, H, D); log_decay (log alpha), beta: (B, H). Returns
        what q reads (B, H, D), and the new memory.
        """
        memory = log_decay.exp()[..., None, None] * memory
        error = v - read(memory, k)  # of the decayed memory; in GPN the error comes before the decay
        memory = memory + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
        return read(memory, q), memory

    def empty_memory(self, like):
        """M before a document: zeros (B, H, K, D) with the batch size, dtype and device of `like` (B, ...)."""
        return like.new_zeros(len(like), *self.memory_shape)

    @outside_graphs  # a compiler would unroll all n steps
    def loop(self, memory, *tokens, is_doc_start=None, active=None):
        """Apply `step` to n tokens: returns what they read (B, n, H, D), and the last memory.

        tokens: q, k, v, log_decay and beta, as in `step` but (B, n, ...); is_doc_start: (B, n), tokens before which the
        memory is emptied; active: (B, n), False for tokens to skip. For the backward pass, only the memory before each
        segment of chunk_len tokens is kept, and the steps of a segment are recomputed.
        """
        reads = []
        for a in range(0, tokens[0].shape[1], self.chunk_len):
            segment = [x if x is None else x[:, a:a + self.chunk_len] for x in (is_doc_start, active, *tokens)]
            if torch.is_grad_enabled():
                segment_reads, memory = checkpoint(self._segment, memory, *segment, use_reentrant=False)
            else:
                segment_reads, memory = self._segment(memory, *segment)
            reads += segment_reads
        return torch.stack(reads, 1), memory

    def _segment(self, memory, is_doc_start, active, *tokens):
        reads = []
        for t in range(tokens[0].shape[1]):
            before = memory
            if is_doc_start is not None:
                before = torch.where(is_doc_start[:, t, None, None, None], self.empty_memory(memory), memory)
            memory_read, after = self.step(before, *(x[:, t] for x in tokens))
            memory = after if active is None else torch.where(active[:, t, None, None, None], after, memory)
            reads.append(memory_read)
        return reads, memory

    def scan(self, memory, *tokens, is_doc_start=None, active=None):
        """Run the tokens through `loop` or, if there are several, through its fast form."""
        if self.fast is None or tokens[0].shape[1] == 1:
            return self.loop(memory, *tokens, is_doc_start=is_doc_start, active=active)
        with torch.autocast(memory.device.type, enabled=False):  # bf16 sums would differ from the loop's
            return self.fast(memory, tokens, is_doc_start, active, self.chunk_len)

    @checkpointed
    def forward(self, h, same_doc=None, is_doc_start=None, cache=None):
        """h: (B, n, C) -> (B, n, C). The masks are those of `document_masks`; the cache is for decoding."""
        def heads(x):  # (B, n, H size) -> (B, n, H, size), in fp32 like the memory
            return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.memory_shape[0], -1))

        x = self.memory_norm(h)
        qkv = self.qkv(x)
        qkv = F.pad(qkv, (0, 0, self.conv.shape[1] - 1, 0)) if cache is None else cache.join(self.layer, qkv)
        q, k, v = map(heads, F.silu(short_convolution(qkv, self.conv, same_doc)).split(self.sizes, -1))
        q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)  # 1 / sqrt(K): official code
        beta = torch.sigmoid(heads(self.beta(x)).squeeze(-1))  # (B, n, H)
        log_decay = -self.log_rate.exp() * F.softplus(heads(self.decay(x)).squeeze(-1) + self.dt_bias)  # log alpha
        if cache is None:
            memory_read, _ = self.scan(self.empty_memory(q), q, k, v, log_decay, beta, is_doc_start=is_doc_start)
        else:
            memory_read = cache.scan(self, q, k, v, log_decay, beta, is_doc_start=is_doc_start)
        h = h + self.read_out(self.out_norm(memory_read.to(x.dtype)).flatten(2) * F.silu(self.read_gate(x)))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        if c.scan in ('fast', 'fla') and gdn is None:
            raise ValueError(f"scan = {c.scan!r} needs the folder scans/, which is missing: use scan = 'loop'")
        self.fast = None  # a function of scans/gdn.py that replaces `Block.loop`, or None
        if c.scan == 'fla':
            self.fast = gdn.import_fla()
        elif pinned and pinned(self, gdn):
            self.fast = gdn.scan_chunks
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, layer, self.fast) for layer in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        # Initialises every matrix and bias: set anything that should start differently after it.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # no matrix is scaled down with depth (official code)
                nn.init.normal_(p, std=c.init_std)
            elif name.endswith('.bias'):  # not dt_bias
                nn.init.zeros_(p)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)  # with nn.Linear's initial weights (authors' code)

    def final_hidden(self, idx, cache=None):
        """Return the head's inputs (B, n, C). idx: (B, n), which continue the rows of the cache if there is one."""
        W, masks = self.config.conv_size, ()
        if self.config.eos_id is not None:
            is_eos = idx == self.config.eos_id
            masks = document_masks(F.pad(is_eos, (W - 1, 0)) if cache is None else cache.join('is_eos', is_eos), W)
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, *masks, cache=cache)
        return self.norm(h)

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, mean nats per token. idx, targets: (B, T) int64; -1 is ignored.

        With eos_id set, the target of an eos input is ignored: it starts another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        rows = self.final_hidden(idx).flatten(0, 1), targets.flatten()
        total, = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        loss = total / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': loss.detach()}

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, C); targets: (N,)."""
        return F.cross_entropy(at_least_fp32(self._logits(h)), targets, ignore_index=-1, reduction='sum'),

    def _logits(self, h):
        """Return logits over all V rows, for the loss and decoding."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows. It has the same size for any max_tokens, and keeps the memory in fp32."""
        return Cache(self, batch_size, max_tokens, max_run, device or self.embed.weight.device)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache and return their next-token logits, as in model_standard.py, for any n."""
        cache.begin(tokens.shape[1], lengths)
        h = self.final_hidden(tokens, cache)
        last = cache.end(h)
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token: weights (2 forward, 4 backward), and three products with the memory.

        Per head these are two reads and a write of 2 K D each, and twice that backward.
        """
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 18 * c.n_layer * c.n_head * c.d_k * c.d_v


class Cache:
    """Decoding state, of one size for any number of tokens.

        tokens of a row    [ written to the memory | run: the last max_run of the last call, not written yet ]

    The next call writes what is left of the run, so `rollback` only has to shorten it. For the run and the W - 1 tokens
    before it, `window` holds the inputs of each layer's convolution and which tokens are eos.
    """

    def __init__(self, model, batch_size, max_tokens, max_run, device):
        c, B, window = model.config, batch_size, model.config.conv_size - 1 + max_run
        self.max_tokens, self.max_run, self.eos_id, self.conv_size = max_tokens, max_run, c.eos_id, c.conv_size
        like = torch.empty(B, device=device, dtype=torch.promote_types(model.embed.weight.dtype, torch.float32))
        self.memory = torch.stack([block.empty_memory(like) for block in model.blocks])  # (L, B, H, K, D)
        self.run = [[like.new_zeros(B, max_run, *shape) for shape in block.token_shapes] for block in model.blocks]
        self.window = {block.layer: like.new_zeros(B, window, sum(block.sizes)) for block in model.blocks}
        self.window['is_eos'] = torch.zeros(B, window, device=device, dtype=torch.bool)
        self.run_len = torch.zeros(B, device=device, dtype=torch.int64)
        self.lengths = torch.zeros(B, device=device, dtype=torch.int64)  # tokens held by each row
        self.hidden = torch.zeros(B, max_run, c.n_embd, device=device, dtype=model.embed.weight.dtype)  # of the run
        self.rows = torch.arange(B, device=device).unsqueeze(1)

    @property
    def nbytes(self):
        """Bytes of all tensors that outlive a call."""
        kept = self.memory, self.run_len, self.lengths, self.hidden, self.rows
        return sum(x.nbytes for x in (*kept, *self.window.values(), *sum(self.run, [])))

    def begin(self, n, lengths):
        """Start a call of n tokens, right-padded to lengths (B,) or None."""
        self.position = torch.arange(max(n, self.max_run) + self.conv_size, device=self.lengths.device)
        self.n_new = torch.full_like(self.lengths, n) if lengths is None else lengths
        self.before_idx = self.run_len[:, None] + self.position[:self.conv_size - 1]  # the W - 1 tokens before the call
        self.is_unwritten = self.position[:self.max_run] < self.run_len[:, None]  # in the last call's run
        self.unwritten_starts = None
        if self.eos_id is not None:
            self.unwritten_starts = document_masks(self.window['is_eos'], self.conv_size)[1].clone()
        self.run_start = (self.n_new - self.max_run).clamp(min=0)[:, None]  # of this call's run
        self.is_early = self.position[:n] < self.run_start

    def keep(self, kept, x):
        """Write x (B, m, ...) to `kept` from the start of this call's run on, as far as it fits."""
        m = min(kept.shape[1], x.shape[1])
        kept[:, :m] = x[self.rows, self.run_start + self.position[:m]]

    def join(self, name, x):
        """Put the W - 1 inputs before the call in front of x (B, n, ...), and keep the window."""
        window = self.window[name]
        x = torch.cat([window[self.rows, self.before_idx].to(x.dtype), x], 1)
        self.keep(window, x)
        return x

    def scan(self, block, *tokens, is_doc_start):
        """Return what the tokens of the call read (B, n, H, D) in a layer. Writes all tokens before this call's run."""
        memory, run = self.memory[block.layer], self.run[block.layer]
        memory.copy_(block.scan(memory, *run, is_doc_start=self.unwritten_starts, active=self.is_unwritten)[1])
        memory_read, _ = block.scan(memory, *tokens, is_doc_start=is_doc_start)
        if tokens[0].shape[1] > self.max_run:
            memory.copy_(block.scan(memory, *tokens, is_doc_start=is_doc_start, active=self.is_early)[1])
        for kept, x in zip(run, tokens):
            self.keep(kept, x)
        return memory_read

    def end(self, h):
        """Finish a call with final vectors h (B, n, C). Returns the last token's of each row (B, C)."""
        self.run_len.copy_(self.n_new - self.run_start[:, 0])
        self.lengths += self.n_new
        self.keep(self.hidden, h)
        return h[self.rows[:, 0], self.n_new - 1]

    def rollback(self, n):
        """Forget the last n tokens of the last call: n is an int, or (B,) int64 with one count per row."""
        self.run_len -= n
        self.lengths -= n
