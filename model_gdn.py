"""Gated DeltaNet ("Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464).

A Transformer whose attention is exchanged for a matrix memory of fixed size. Each token lets the memory decay, reads
what its key still finds there, and writes the difference from its value: the gated delta rule. Queries, keys and values
first pass a short causal convolution. This is the second baseline of the GPN paper (arXiv 2605.10643).

Read `Model.step`, which is the memory's equation, then `Block.forward`, and `Model.loop`, which repeats the step over
tokens. Nothing else is needed to train, evaluate and decode. scans/gdn.py computes the same function in matrix products
over chunks of tokens; `Model.choose_scan` compares the two and takes it only where they agree: edit the equation and
your equation runs. `extend` and `Cache` are decoding.

    B  batch     T  positions    C  width, n_embd    V  vocabulary rows, padded    F  feed-forward width, n_ffn
    L  layers    H  heads        K  d_k, rows of a head's memory: its keys         D  d_v, its columns: its values
    M  the memory (B, H, K, D), transposed S of the paper                          W  taps of the convolution
    X  channels that are convolved, H (2 K + D)      h  a token's vector           n  positions of one `extend` call
    is_doc_start  tokens that follow the end of a document: their memory and their convolution start anew
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import checkpointed, choose_scan, import_scan, linear_cross_entropy, outside_graphs, rms_norm

fast = import_scan('gdn')  # None where the folder scans/ has been removed


@dataclass
class Config:
    n_layer: int = 10  # blocks, L (GPN paper, table 1)
    n_head: int = 6  # heads of the memory, H (inferred: 1,966,080 numbers of state in that table)
    n_embd: int = 768  # width of the residual stream, C
    d_k: int = 128  # size of a head's keys, K (inferred, as n_head)
    d_v: int = 256  # size of a head's values, D (inferred, as n_head; twice d_k in the official code)
    n_ffn: int | None = None  # feed-forward width, F; None: 23/12 n_embd in whole 32s (inferred: 1472 at 768 is 130M)
    conv_size: int = 4  # taps of the short convolution, W: a token and those before it
    chunk_len: int = 64  # tokens that the parallel form takes at once, and that the loop's backward recomputes at once
    scan: str = 'auto'  # loop: the equation as it reads; fast: scans/gdn.py; auto: fast where both are shown to agree
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial matrices, the convolution's too (official code)
    vocab_size: int = 32000  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 32000  # real token ids; rows from here on are padding
    eos_id: int | None = None  # the id that ends a document: memory and convolution start anew; None: never

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'd_k', 'd_v', 'chunk_len', 'n_ids', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        if not 2 <= self.conv_size <= 64:
            raise ValueError(f'conv_size = {self.conv_size}: expected 2 to 64 taps')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None')
        if self.scan not in ('auto', 'loop', 'fast'):
            raise ValueError(f"scan = {self.scan!r}: expected 'auto', 'loop' or 'fast'")
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or max(1, round(23 / 12 * self.n_embd / 32)) * 32


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def l2_normalize(x):
    """x (..., K) over its length; 1e-6 under the root is the official code's."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def read(memory, x):
    """M^T x of each head: memory (B, H, K, D), x (B, H, K) -> (B, H, D). Autocast would make a matrix product bf16."""
    return (memory * x.unsqueeze(-1)).sum(-2)


def short_convolution(x, weight, seen=None):
    """y_t = sum over taps j of weight_j x_{t-W+1+j}.

    x (B, W - 1 + n, X), the W - 1 before them first; weight (X, W); seen (B, n, W): which of a token's taps are in
    its document, None for all. Returns (B, n, X).
    """
    n, y = x.shape[1] - weight.shape[1] + 1, 0
    for j in range(weight.shape[1]):
        tap = weight[:, j] * x[:, j:j + n]
        y = y + (tap if seen is None else tap * seen[:, :, j:j + 1])
    return y


def document_masks(ends, conv_size):
    """Where documents cut. ends (B, W - 1 + n): tokens that end one, the W - 1 before them first.

    Returns seen (B, n, W), as in `short_convolution`, and is_doc_start (B, n), tokens after the end of a document.
    """
    document = F.pad(ends[:, :-1].long().cumsum(1), (1, 0))  # the number of each token's document
    of_taps = document.unfold(1, conv_size, 1)  # (B, n, W)
    return of_taps == of_taps[..., -1:], ends[:, conv_size - 2:-1]


class Block(nn.Module):
    """The memory's layer, where a Transformer has attention, then a SwiGLU net (paper, section 3.4 and figure 1)."""

    def __init__(self, config, layer):
        super().__init__()
        c, C, H, D = config, config.n_embd, config.n_head, config.d_v
        self.layer, self.n_head, self.sizes = layer, H, [H * c.d_k, H * c.d_k, H * D]
        self.checkpoints = c.checkpoint_blocks
        self.memory_norm = RMSNorm(C, c.norm_eps)
        self.qkv = nn.Linear(C, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.empty(sum(self.sizes), c.conv_size))
        self.beta = nn.Linear(C, H, bias=False)
        self.decay = nn.Linear(C, H, bias=False)
        rate = torch.empty(H).uniform_(0, 16).clamp(min=1e-8)
        self.log_rate = nn.Parameter(rate.log())  # A_log in the official code
        dt = torch.empty(H).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus gives dt
        self.read_gate = nn.Linear(C, H * D, bias=False)
        self.out_norm = RMSNorm(D, c.norm_eps)
        self.read_out = nn.Linear(H * D, C, bias=False)
        self.ffn_norm = RMSNorm(C, c.norm_eps)
        self.gate_up = nn.Linear(C, 2 * c.n_ffn, bias=False)
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)

    @checkpointed
    def forward(self, h, convolve, remember):
        """h (B, n, C) -> (B, n, C).

        convolve(layer, x, weight) is the short convolution of x (B, n, X); remember(layer, q, k, v, log_decay, beta)
        writes to the memory and reads from it at each token, as `Model.scan`. Both go over the whole window in
        training, and on from a cache in decoding.
        """
        def heads(x):  # (B, n, H size) -> (B, n, H, size), in the memory's dtype
            return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.n_head, -1))

        x = self.memory_norm(h)
        q, k, v = map(heads, F.silu(convolve(self.layer, self.qkv(x), self.conv)).split(self.sizes, -1))
        q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)  # 1 / sqrt(K): official code
        beta = torch.sigmoid(heads(self.beta(x)).squeeze(-1))  # (B, n, H)
        log_decay = -self.log_rate.exp() * F.softplus(heads(self.decay(x)).squeeze(-1) + self.dt_bias)  # log alpha
        memory_read = self.out_norm(remember(self.layer, q, k, v, log_decay, beta))  # a norm a head: official code
        gated = memory_read.flatten(2).to(x.dtype) * F.silu(self.read_gate(x))
        h = h + self.read_out(gated)
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.scan_report = None  # what `choose_scan` found
        for name, p in self.named_parameters():  # all at once: what is to start otherwise is set after it
            if p.dim() >= 2:  # as the official code: no matrix is scaled down with depth
                nn.init.normal_(p, std=c.init_std)
            elif name.endswith('.bias'):  # not dt_bias
                nn.init.zeros_(p)

    # ---- the memory's equation ----

    def step(self, memory, q, k, v, log_decay, beta):
        """One token of the gated delta rule (section 3.1).

            S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t

        memory (B, H, K, D), which is S^T; q, k (B, H, K); v (B, H, D); log_decay, beta (B, H). Returns what q reads
        (B, H, D), and the new memory.
        """
        memory = log_decay.exp()[..., None, None] * memory
        error = v - read(memory, k)  # of the decayed memory; in GPN the error comes before the decay
        memory = memory + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
        return read(memory, q), memory

    def empty_memory(self, batch_size, device=None):
        """M before a document's first token: zeros, in fp32 at least."""
        c, weight = self.config, self.embed.weight
        return torch.zeros(batch_size, c.n_head, c.d_k, c.d_v, device=device or weight.device,
                           dtype=torch.promote_types(weight.dtype, torch.float32))

    @outside_graphs  # a compiler would unroll all T steps
    def loop(self, memory, *tokens, is_doc_start=None, active=None):
        """`step` for each of n tokens: q, k, v, log_decay, beta as there, with an axis of positions after B.

        is_doc_start (B, n): tokens whose memory is emptied first; active (B, n): False at tokens that are not there.
        Returns what is read (B, n, H, D), and the last memory. For the backward only the memory at the start of each
        segment is held; its steps are taken a second time.
        """
        masks, reads = [is_doc_start, active], []
        for a in range(0, tokens[0].shape[1], self.config.chunk_len):
            segment = [x if x is None else x[:, a:a + self.config.chunk_len] for x in (*masks, *tokens)]
            if torch.is_grad_enabled():
                part, memory = checkpoint(self._segment, memory, *segment, use_reentrant=False)
            else:
                part, memory = self._segment(memory, *segment)
            reads.append(part)
        return torch.cat(reads, 1), memory

    def _segment(self, memory, is_doc_start, active, *tokens):
        """`loop` over one segment."""
        reads, empty = [], self.empty_memory(len(memory), memory.device)
        for t in range(tokens[0].shape[1]):
            before = memory
            if is_doc_start is not None:
                before = torch.where(is_doc_start[:, t, None, None, None], empty, memory)
            memory_read, new = self.step(before, *(x[:, t] for x in tokens))
            memory = new if active is None else torch.where(active[:, t, None, None, None], new, memory)
            reads.append(memory_read)
        return torch.stack(reads, 1), memory

    # ---- training ----

    @outside_graphs
    def choose_scan(self):
        """Decides whether `loop` runs or scans/gdn.py: the report of `attn_kernels.choose_scan`.

        It happens at the first use, and again on another type of device. Call it after a new module or hook.
        """
        self.scan_report = choose_scan(self, fast, chunk_len=4)
        return self.scan_report

    def scan(self, memory, *tokens, is_doc_start=None, active=None):
        """What `loop` does, in the form that `choose_scan` chose."""
        if self.scan_report['scan'] == 'fast' and tokens[0].shape[1] > 1:  # a single token is faster as it reads
            return fast.scan_chunks(memory, *tokens, is_doc_start, active, self.config.chunk_len)
        return self.loop(memory, *tokens, is_doc_start=is_doc_start, active=active)

    def _run_blocks(self, idx, convolve, remember):
        """idx (B, n) -> the final normalised vectors (B, n, C); convolve and remember as in `Block.forward`."""
        if self.scan_report is None or self.scan_report['device'] != idx.device.type:
            self.choose_scan()  # here, not in `scan`, which may run under a checkpoint
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, convolve, remember)
        return self.norm(h)

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, C)."""
        W, seen, is_doc_start = self.config.conv_size, None, None
        if self.config.eos_id is not None:
            seen, is_doc_start = document_masks(F.pad(idx == self.config.eos_id, (W - 1, 0)), W)
        memory = self.empty_memory(len(idx))
        return self._run_blocks(
            idx, lambda layer, x, weight: short_convolution(F.pad(x, (0, 0, W - 1, 0)), weight, seen),
            lambda layer, *tokens: self.scan(memory, *tokens, is_doc_start=is_doc_start)[0])

    def states(self, idx):
        """What `choose_scan` compares. idx (B, T) -> (B, T, C)."""
        return self.final_hidden(idx)

    def cached_states(self, idx):
        """`states`, as decoding gives them, of the last two tokens of each of three calls.

        `choose_scan` compares these besides: a single token has one form. idx (B, T), T > 7.
        """
        cache, states = self.new_cache(*idx.shape, max_run=2), []
        for tokens in (idx[:, :5], idx[:, 5:7], idx[:, 7:]):
            self.extend(tokens, cache)
            states.append(cache.hidden[:, :tokens.shape[1]].clone())
        return torch.cat(states, 1)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token.

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self.final_hidden(idx)
        # linear_cross_entropy makes logits in parts, without `_logits`: an edit there belongs here too.
        loss = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        """What the head makes of h (..., C). Training's loss does not pass here: an edit belongs in `forward` too."""
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    # ---- decoding ----

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows. It has the same size for any max_tokens, and keeps the memory in fp32."""
        device, dtype = device or self.embed.weight.device, dtype or self.embed.weight.dtype
        return Cache(self.config, self.empty_memory(batch_size, device), max_tokens, max_run, dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions. Prefill,
        decoding and the verification of a draft are this one call. Shapes are static for a given n, and nothing waits
        for the device.
        """
        cache.begin(tokens, torch.full_like(cache.lengths, tokens.shape[1]) if lengths is None else lengths)
        h = self._run_blocks(tokens, cache.convolve, lambda layer, *new: cache.remember(layer, self.scan, *new))
        last = cache.end(h)
        return self._logits(h if all_positions else last)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token: weights (2 forward, 4 backward), and the memory's three products.

        These are what the key finds, what is written and what the query reads, 2 K D each, and twice that backward.
        """
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 18 * c.n_layer * c.n_head * c.d_k * c.d_v


class Cache:
    """Memory and last inputs of each row, of one size for any number of tokens.

        a row's tokens   [ older, written to the memory | tail, the last max_run of the last call ]

    Of the tail it keeps q, k, v, log_decay and beta, not yet written to the memory. The next call writes what is left
    of them: so `rollback` only shortens the tail.
    """

    def __init__(self, config, memory, max_tokens, max_run, dtype):
        c, B, device = config, len(memory), memory.device
        self.max_tokens, self.max_run, self.eos_id, self.conv_size = max_tokens, max_run, c.eos_id, c.conv_size
        self.memory = memory.repeat(c.n_layer, 1, 1, 1, 1)  # without the tail
        sizes = (c.n_head, c.d_k), (c.n_head, c.d_k), (c.n_head, c.d_v), (c.n_head,), (c.n_head,)
        self.tails = [[memory.new_zeros(B, max_run, *size) for size in sizes]  # q, k, v, log_decay, beta
                      for _ in range(c.n_layer)]
        n_inputs, n_channels = c.conv_size - 1 + max_run, c.n_head * (2 * c.d_k + c.d_v)
        self.inputs = memory.new_zeros(c.n_layer, B, n_inputs, n_channels)  # of the convolution, in the tail and before
        self.ends = torch.zeros(B, n_inputs, device=device, dtype=torch.bool)  # those that end a document
        self.tail_len = torch.zeros(B, device=device, dtype=torch.int64)
        self.lengths = torch.zeros(B, device=device, dtype=torch.int64)  # tokens held by each row
        self.hidden = torch.zeros(B, max_run, c.n_embd, device=device, dtype=dtype)  # of the last call
        self.batch_idx = torch.arange(B, device=device).unsqueeze(1)

    @property
    def nbytes(self):
        """Bytes of all tensors that outlive a call."""
        kept = self.memory, self.inputs, self.ends, self.tail_len, self.lengths, self.hidden, self.batch_idx
        return sum(x.nbytes for x in (*kept, *sum(self.tails, [])))

    def begin(self, tokens, n_new):
        """Starts a call that appends n_new (B,) of tokens (B, n): where tails end and start, where documents cut."""
        n, W = tokens.shape[1], self.conv_size
        position = torch.arange(n, device=tokens.device)
        self.n_new, self.tail_start = n_new, (n_new - self.max_run).clamp(min=0)
        self.tail_idx = self.tail_start[:, None] + position[:self.max_run]
        self.is_early = position[:max(0, n - self.max_run)] < self.tail_start[:, None]
        self.before_idx = self.tail_len[:, None] + torch.arange(W - 1, device=tokens.device)
        longest = self.max_run
        if tokens.device.type == 'cpu':  # on a GPU to look at a length would mean to wait
            longest = int(self.tail_len.max())
        self.is_unwritten = torch.arange(longest, device=tokens.device) < self.tail_len[:, None]
        self.is_doc_start = self.tail_is_doc_start = self.seen = None
        if self.eos_id is not None:
            self.tail_is_doc_start = document_masks(self.ends, W)[1].clone()  # `_keep` writes over it
            ends = torch.cat([self.ends.gather(1, self.before_idx), tokens == self.eos_id], 1)
            self.seen, self.is_doc_start = document_masks(ends, W)
            self._keep(self.ends, ends)

    def _keep(self, own, x):
        """Saves of x (B, W - 1 + n, ...) the part that belongs to the tail and to the W - 1 tokens before it."""
        size = min(own.shape[1], x.shape[1])
        own[:, :size] = x[self.batch_idx, self.tail_start[:, None] + torch.arange(size, device=x.device)]

    def convolve(self, layer, x, weight):
        """The short convolution of a layer's new inputs x (B, n, X) -> (B, n, X)."""
        x = torch.cat([self.inputs[layer][self.batch_idx, self.before_idx].to(x.dtype), x], 1)
        self._keep(self.inputs[layer], x)
        return short_convolution(x, weight, self.seen)

    def remember(self, layer, scan, *new):
        """What the new queries read (B, n, H, D), as in `Block.forward`; new: their q, k, v, log_decay, beta."""
        tail = self.tails[layer]
        if [x.shape[2:] for x in tail] != [x.shape[2:] for x in new]:  # an edited block's first tokens: nothing is kept
            tail[:] = [x.new_zeros(len(x), self.max_run, *x.shape[2:]) for x in new]
        self._write(layer, scan, tail, self.tail_is_doc_start, self.is_unwritten)
        memory_read, _ = scan(self.memory[layer], *new, is_doc_start=self.is_doc_start)
        self._write(layer, scan, new, self.is_doc_start, self.is_early)
        for own, x in zip(tail, new):
            own[:, :self.tail_idx.shape[1]] = x[self.batch_idx, self.tail_idx]
        return memory_read

    def _write(self, layer, scan, tokens, is_doc_start, active):
        """Takes the first of tokens q, k, v, log_decay, beta into a layer's memory, where active (B, m)."""
        m = active.shape[1]
        if m > 0:
            is_doc_start = None if is_doc_start is None else is_doc_start[:, :m]
            _, memory = scan(self.memory[layer], *(x[:, :m] for x in tokens), is_doc_start=is_doc_start, active=active)
            self.memory[layer].copy_(memory)

    def end(self, h):
        """Counts the call's tokens as held: h (B, n, C) -> that of each row's last token (B, C)."""
        self.hidden[:, :self.tail_idx.shape[1]] = h[self.batch_idx, self.tail_idx]
        self.tail_len.copy_(self.n_new - self.tail_start)
        self.lengths += self.n_new
        return h[self.batch_idx[:, 0], self.n_new - 1]

    @torch.no_grad()
    def rollback(self, n):
        """Forgets the last n tokens of the last call: n an int, or (B,) int64 with one count a row."""
        self.tail_len -= n
        self.lengths -= n
