"""Gated DeltaNet ("Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464).

A Transformer with a matrix memory of fixed size in place of attention. For each token, the gated
delta rule lets the memory decay, reads it with the token's key, and writes the difference between
the token's value and the result. Queries, keys and values first pass through a short causal
convolution. It is a baseline in the GPN paper (arXiv 2605.10643), next to the Transformer.

Read `Block.step`, the memory's equation, then `Block.forward`. `Block.loop` applies it token by
token. scans/gdn.py computes the same in chunks of tokens. It runs unless they are edited.

    B  batch size   T  positions   C  width, n_embd   V  vocabulary, padded    F  feed-forward width
    L  layers       H  heads       K  key size, d_k   D  value size, d_v       W  convolution taps
    M  memory (B, H, K, D), transpose of the paper's S    X  convolved channels, H (2 K + D)
    h  hidden states   o  outputs of the memory           n  tokens of a call, T in training
    is_doc_start  (B, n), True at the first token of a document, not of a row: the memory is emptied
    same_doc      (B, n, W), False for taps of the convolution in another document
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (CrossEntropy, check_sizes, checkpointed, chunked_loss, counted_targets, mask_padding,
                          outside_graphs)
from state_cache import StateCache

try:
    from scans import gdn, pinned
except ImportError:  # the folder scans/ is optional
    gdn = pinned = None


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'scan', 'chunk_len', 'checkpoint_blocks'  # settings that only affect speed and memory

    n_layer: int = 10  # blocks, L (GPN paper, table 1)
    n_head: int = 6  # memory heads, H (inferred from the 1,966,080 state values in that table)
    n_embd: int = 768  # width of the residual stream, C
    d_k: int = 128  # key size of a head, K (inferred, as n_head)
    d_v: int = 256  # value size of a head, D (inferred, as n_head; twice d_k in the official code)
    n_ffn: int | None = None  # feed-forward width, F; None: 23/12 n_embd, to a multiple of 32 (inferred from 130M)
    conv_size: int = 4  # taps of the short convolution, W, at least 2: the current token and earlier ones
    chunk_len: int = 64  # tokens of a chunk in scans/gdn.py (rounded up to 2^i) and of a segment in `Block.loop`
    scan: Literal['auto', 'loop', 'fast', 'fla'] = 'auto'  # auto: fast (scans/gdn.py) if the equation is unedited
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    norm_eps: float = 1e-6  # epsilon of RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of initial matrices and convolutions, except the head (fla)
    vocab_size: int = 32000  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 32000  # number of token ids; rows from n_ids on are padding
    eos_id: int | None = None  # end-of-document id: memory and convolution restart after it; None: never

    def __post_init__(self):
        check_sizes(self, n_head=1, d_k=1, d_v=1, conv_size=2, chunk_len=1)
        self.n_ffn = self.n_ffn or max(1, round(23 / 12 * self.n_embd / 32)) * 32


def l2_normalize(x):
    """Scale x (..., K) to length 1, with 1e-6 under the root (official code). GPN has 1e-12."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def read(memory, x):
    """Return M^T x per head: (B, H, K, D), (B, H, K) -> (B, H, D). Autocast does not affect it."""
    return (memory * x.unsqueeze(-1)).sum(-2)


def short_convolution(x, weight, same_doc=None):
    """Convolve each channel causally: y_t = sum over taps j of weight_j x_{t-W+1+j}.

    x: (B, W - 1 + n, X), W - 1 of them before the n tokens; weight: (X, W). Returns (B, n, X).
    """
    n, y = x.shape[1] - weight.shape[1] + 1, 0
    for j in range(weight.shape[1]):
        tap = weight[:, j] * x[:, j:j + n]
        y = y + (tap if same_doc is None else tap * same_doc[:, :, j:j + 1])
    return y


def document_masks(is_eos, conv_size):
    """Return same_doc (B, n, W), is_doc_start (B, n). is_eos: (B, W - 1 + n), W - 1 come before."""
    document = F.pad(is_eos[:, :-1].long().cumsum(1), (1, 0))  # index of each token's document
    taps = document.unfold(1, conv_size, 1)  # (B, n, W), a token's own is the last
    return taps == taps[..., -1:], is_eos[:, conv_size - 2:-1]  # is_eos of the token before each of the n


class Block(nn.Module):
    """Gated DeltaNet layer: matrix memory, then a SwiGLU net (section 3.4 and figure 1)."""

    def __init__(self, config, layer, fast=None):
        super().__init__()
        c, C, H, K, D = config, config.n_embd, config.n_head, config.d_k, config.d_v
        self.layer, self.fast, self.chunk_len, self.checkpoints = layer, fast, c.chunk_len, c.checkpoint_blocks
        self.memory_shape = H, K, D
        self.qkv_sizes = [H * K, H * K, H * D]
        self.joined_sizes = [sum(self.qkv_sizes), H, H]  # of qkv, beta and decay
        self.memory_norm = nn.RMSNorm(C, c.norm_eps)
        self.qkv = nn.Linear(C, sum(self.qkv_sizes), bias=False)
        self.conv = nn.Parameter(torch.empty(sum(self.qkv_sizes), c.conv_size))
        self.beta = nn.Linear(C, H, bias=False)
        self.decay = nn.Linear(C, H, bias=False)
        rate = torch.empty(H).uniform_(0, 16).clamp(min=1e-8)
        self.log_rate = nn.Parameter(rate.log())  # A_log in the official code
        dt = torch.empty(H).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt
        self.read_gate = nn.Linear(C, H * D, bias=False)
        self.out_norm = nn.RMSNorm(D, c.norm_eps)  # per head (official code)
        self.read_out = nn.Linear(H * D, C, bias=False)
        self.ffn_norm = nn.RMSNorm(C, c.norm_eps)
        self.gate_up = nn.Linear(C, 2 * c.n_ffn, bias=False)
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)

    def step(self, x, memory):
        """Apply the gated delta rule (section 3.1) to one token. Returns o (B, H, D), the memory.

            S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t

        x: q, k (B, H, K), v (B, H, D), log alpha and beta (B, H); memory: S^T, (B, H, K, D).
        """
        q, k, v, log_decay, beta = x
        memory = log_decay.exp()[..., None, None] * memory
        error = v - read(memory, k)  # error of the decayed memory (in GPN: of the memory before the decay)
        memory = memory + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
        return read(memory, q), memory

    @outside_graphs  # the compiler would unroll all n steps
    def loop(self, memory, tokens, is_doc_start=None, active=None):
        """Apply `step` to n tokens. Returns o (B, n, H, D) and the last memory.

        tokens: x of `step`, but (B, n, ...); is_doc_start: (B, n), True empties the memory before
        the token; active: (B, n), False skips it. Checkpointed in segments of chunk_len tokens.
        """
        def segment(memory, is_doc_start, active, *tokens):
            outputs = []
            for t in range(tokens[0].shape[1]):
                before = memory if is_doc_start is None else memory.masked_fill(is_doc_start[:, t, None, None, None], 0)
                output, after = self.step([x[:, t] for x in tokens], before)
                memory = after if active is None else torch.where(active[:, t, None, None, None], after, memory)
                outputs.append(output)
            return outputs, memory

        outputs = []
        for a in range(0, tokens[0].shape[1], self.chunk_len):
            args = memory, *(x if x is None else x[:, a:a + self.chunk_len] for x in (is_doc_start, active, *tokens))
            new, memory = checkpoint(segment, *args, use_reentrant=False) if torch.is_grad_enabled() else segment(*args)
            outputs += new
        return torch.stack(outputs, 1), memory

    def recurrence(self, tokens, is_doc_start=None, active=None, memory=None):
        """Return what `loop` returns; `self.fast` computes it, if set. No memory: an empty one."""
        if memory is None:
            memory = tokens[0].new_zeros(len(tokens[0]), *self.memory_shape)
        if self.fast is None or tokens[0].shape[1] == 1:
            return self.loop(memory, tokens, is_doc_start, active)
        with torch.autocast(memory.device.type, enabled=False):  # bf16 sums would differ from the loop's
            return self.fast(memory, tokens, is_doc_start, active, self.chunk_len)

    @checkpointed
    def forward(self, h, same_doc=None, is_doc_start=None, cache=None):
        """Apply the block to h (B, n, C). With a cache, masks cover max_call tokens before, too."""
        def heads(x):  # (B, n, H size) -> (B, n, H, size), in fp32 like the memory
            return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.memory_shape[0], -1))

        x, n_before = self.memory_norm(h), self.conv.shape[1] - 1
        qkv, beta_logits, decay_logits = self.qkv(x), self.beta(x), self.decay(x)
        if cache is None:
            qkv = F.pad(qkv, (0, 0, n_before, 0))
        else:  # tokens before the call come first: n_before for the convolution, then max_call for the memory
            joined = cache.join(self.layer, torch.cat([qkv, beta_logits, decay_logits], -1))
            qkv, beta_logits, decay_logits = joined.split(self.joined_sizes, -1)
            beta_logits, decay_logits = beta_logits[:, n_before:], decay_logits[:, n_before:]
        q, k, v = map(heads, F.silu(short_convolution(qkv, self.conv, same_doc)).split(self.qkv_sizes, -1))
        q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)  # 1 / sqrt(K): official code
        beta = torch.sigmoid(heads(beta_logits).squeeze(-1))  # (B, n, H)
        log_decay = -self.log_rate.exp() * F.softplus(heads(decay_logits).squeeze(-1) + self.dt_bias)  # log alpha
        tokens = q, k, v, log_decay, beta
        o = self.recurrence(tokens, is_doc_start)[0] if cache is None else cache.outputs(self, tokens, is_doc_start)
        h = h + self.read_out(self.out_norm(o.to(x.dtype)).flatten(2) * F.silu(self.read_gate(x)))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        if c.scan in ('fast', 'fla') and gdn is None:
            raise ValueError(f"scan = {c.scan!r} needs the folder scans/, which is missing: use scan = 'loop'")
        self.fast = gdn.scan_chunks if pinned and pinned(self, gdn) else None  # None: scan = 'loop', or an edit
        if c.scan == 'fla':
            self.fast = gdn.import_fla()
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, layer, self.fast) for layer in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        # Initializes every matrix and bias: set other initial values after this loop.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # no scaling with depth (official code)
                nn.init.normal_(p, std=c.init_std)
            elif name.endswith('.bias'):  # not dt_bias
                nn.init.zeros_(p)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)  # nn.Linear's default init (official code)
        self.cross_entropy = CrossEntropy(c.vocab_size)

    def final_hidden(self, idx, cache=None):
        """Return the head's inputs (B, n, C). idx: (B, n); with a cache, its rows' next tokens."""
        W, masks = self.config.conv_size, ()
        if self.config.eos_id is not None:
            is_eos = idx == self.config.eos_id
            masks = document_masks(F.pad(is_eos, (W - 1, 0)) if cache is None else cache.join('is_eos', is_eos), W)
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, *masks, cache=cache)
        return self.norm(h)

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, mean nats per token. idx, targets: (B, T); -1 is ignored."""
        targets = counted_targets(idx, targets, self.config.eos_id)
        rows = (self.final_hidden(idx).flatten(0, 1), targets.flatten())
        total = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        loss = total['nll'] / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': loss.detach()}

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, C); targets: (N,)."""
        return {'nll': self.cross_entropy(self._logits(h), targets)}

    def _logits(self, h):
        """Return logits over all V rows, for the loss and decoding."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty cache for batch_size rows. Its size does not depend on max_tokens."""
        return Cache(self, batch_size, max_call, device or self.embed.weight.device)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n), for any n; return next-token logits as in model_standard.py."""
        cache.begin(tokens.shape[1], lengths)
        h = self.final_hidden(tokens, cache)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    @property
    def memory_cells(self):
        """Return the number of values in the matrix memories of a sequence, L H K D."""
        return len(self.blocks) * math.prod(self.blocks[0].memory_shape)

    def flops_per_token(self, T):
        """Return training FLOPs per token: 6 per linear weight, plus the memory's products."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * (weights + 3 * self.memory_cells)  # two reads and a write of each cell


class Cache(StateCache):
    """Each layer's memory of a row's first n_written tokens, and the later tokens' inputs.

        tokens      [ 0 1 2 ...                   | ... lengths - 1       ]
        memory      [ n_written tokens            |                       ]
        windows     [          convolution's past | may be rolled back    ]    inputs of the layer

    The memory cannot forget a token, but up to max_call tokens of the last call may be rolled back.
    So they are stored in the windows, and the next call writes them to the memory. If max_call = 2,
    a call of tokens 0 ... 4 writes 0 1 2 and stores 3 4. The next, of 5, writes 3 4 and stores 5.
    """

    def __init__(self, model, batch_size, max_call, device):
        c, shape = model.config, (batch_size, model.config.conv_size - 1 + max_call)
        like = dict(device=device, dtype=torch.promote_types(model.embed.weight.dtype, torch.float32))
        windows = {block.layer: torch.zeros(*shape, sum(block.joined_sizes), **like) for block in model.blocks}
        super().__init__(windows | {'is_eos': torch.zeros(shape, device=device, dtype=torch.bool)}, max_call)
        self.memory = torch.zeros(c.n_layer, batch_size, c.n_head, c.d_k, c.d_v, **like)
        self.n_written = torch.zeros_like(self.lengths)

    def begin(self, n, lengths):
        """Start a call, see `StateCache.begin`. It writes what can no longer be rolled back."""
        super().begin(n, lengths)
        position = self.lengths[:, None] + torch.arange(-self.max_call, n, device=self.lengths.device)
        n_written = self.lengths + (self.n_new - self.max_call).clamp(min=0)
        self.writes = (self.n_written[:, None] <= position) & (position < n_written[:, None])  # (B, max_call + n)
        self.n_written.copy_(n_written)

    def join(self, name, x):
        """Store x (B, n, ...). Returns it after the W - 1 + max_call tokens before the call."""
        earlier = self.last(name, self.size).to(x.dtype)
        self.push(name, x)
        return torch.cat([earlier, x], 1)

    def outputs(self, block, tokens, is_doc_start):
        """Return o (B, n, H, D) for tokens (B, max_call + n, ...), and update the memory."""
        def run(part, active, memory):
            starts = None if is_doc_start is None else is_doc_start[:, part]
            return block.recurrence([x[:, part] for x in tokens], starts, active, memory)

        n = tokens[0].shape[1] - self.max_call
        before, new = slice(self.max_call), slice(self.max_call, None)  # tokens before the call, its own tokens
        _, memory = run(before, self.writes[:, before], self.memory[block.layer])  # again, to write them
        o, _ = run(new, None, memory)
        if n > self.max_call:  # again, without the last max_call tokens, which may be rolled back
            _, memory = run(new, self.writes[:, new], memory)
        self.memory[block.layer] = memory
        return o
