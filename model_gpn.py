"""The Grounded Prediction Network (GPN, arXiv 2605.10643).

"A Single-Layer Model Can Do Language Modeling": a recurrent network with one state vector and one
matrix memory. Each token first grounds the predicted state: a gate keeps part of it, and the token
is added. Then a feed-forward net and a read from the memory predict the next state, from which the
next token is decoded. The memory is written once per token by the gated delta rule, with a key from
the previous grounded state and a value from the current one.

Read `Write`, `delta_rule`, `Layer` and `Model.step`, the paper's equations, then `Model.loop`,
which applies them token by token. In training, scans/recurrent.py compiles `step` as it is written
here: an edit trains as fast. On a GPU, scans/delta.py has kernels for the unedited `delta_rule`.
From the official code: the RMSNorms that eq. 4, 8, 9 and 11 do not show, and the biases of Gate_f,
Gate_p, queries, keys and decay.

    B  batch size   T  positions   C  state width, n_embd (the paper's d)   E  embedding width d_emb
    L  layers       F  feed-forward width, n_ffn     H  memory heads         V  vocabulary, padded
    K  key size of a head, d_k     D  value size, d_v                        M  memory (B, H, K, D)
    s  predicted state s^p (B, C)  g  grounded state s^g (B, C)              x_t  token t
    u  a token's contribution to the state (B, C)    n  tokens per `extend` call
    carry_mask  True where the state carries over (B, T); always True at the first token of a row
"""
import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (CrossEntropy, at_least_fp32, check_sizes, chunked_loss, counted_targets, mask_padding,
                          outside_graphs)
from state_cache import StateCache

try:
    from scans import delta, recurrent
except ImportError:  # the folder scans/ is optional
    delta = recurrent = None


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'scan', 'segment_len'  # settings that only affect speed and memory

    n_layer: int = 1  # layers per token, L; they share one state and one memory
    n_head: int = 15  # memory heads, H; 0: no memory (the paper's GPN; with memory it is GPN+M)
    n_embd: int = 2496  # width of the state, C
    d_emb: int = 768  # width of the token embedding and output head, E (inferred: gives table 1's 130M)
    d_k: int = 128  # key size of a memory head, K
    d_v: int = 256  # value size of a memory head, D
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd, to a multiple of 128 (inferred: 6656 at 2496)
    bptt_len: int | None = None  # truncated BPTT: gradients stop at multiples of this many steps; None: never
    segment_len: int = 32  # steps recomputed at a time in the backward pass; the same result
    scan: Literal['auto', 'loop'] = 'auto'  # auto: training uses scans/; loop: it runs the equations token by token
    decoder_bias: bool = False  # learned bias in the decoder (section 7.2; placed as in the official code)
    norm_eps: float = 1e-6  # epsilon of RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial embedding and read_out; others: `init_linear`
    vocab_size: int = 32000  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 32000  # number of token ids; rows from n_ids on are padding
    eos_id: int | None = None  # end-of-document id: state and memory restart after it; None: never (official code)

    def __post_init__(self):
        check_sizes(self, n_head=0, d_emb=1, d_k=1, d_v=1, bptt_len=1, segment_len=1)
        self.n_ffn = self.n_ffn or max(1, round(8 / 3 * self.n_embd / 128)) * 128


def init_linear(weight):
    """Initialize weight (outputs, inputs) as JAX's lecun_normal, a normal truncated at two sigma.

    It is scaled up to offset the truncation: the standard deviation is 1 / sqrt(inputs).
    """
    std = weight.shape[1] ** -0.5 / 0.87962566103423978  # standard deviation of a unit normal truncated at 2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        """Normalize x (..., C) in its own dtype, fp32 or wider; return it in the weights' dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


def l2_normalize(x, eps=1e-6):
    """Scale x (..., K) to length 1, with epsilon as in the official code."""
    return x * (x.square().sum(-1, keepdim=True) + eps ** 2).rsqrt()


def key_of(x):
    """Return keys or queries of length 1, eq. 8, from their projections x (..., K)."""
    return l2_normalize(F.relu(x))


def read(memory, x):
    """Return M^T x per head (M x in the paper): memory (B, H, K, D), x (B, H, K) -> (B, H, D).

    Does not use matmul, because autocast would run it in bf16.
    """
    return (memory * x.unsqueeze(-1)).sum(-2)


def delta_rule(memory, k, v, beta, decay, q):
    """Write to the memory, eq. 10, and read it. Returns the new memory and the read (B, H, D).

    memory: (B, H, K, D); k, q: projections of key and query, (B, H, K); v: (B, H, D); beta and
    decay: (B, H).
    """
    k, q = key_of(k), key_of(q)
    error = v - read(memory, k)
    memory = decay[..., None, None] * memory + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return memory, read(memory, q)


class Write(nn.Module):
    """What a token writes to the memory, eq. 8 and 9: a transition between two grounded states."""

    def __init__(self, config):
        super().__init__()
        c, self.n_head = config, config.n_head
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.key = nn.Linear(c.n_embd, c.n_head * c.d_k)  # W_k, eq. 8
        self.value = nn.Linear(c.n_embd, c.n_head * c.d_v, bias=False)  # W_v, eq. 8
        self.beta = nn.Linear(c.n_embd, c.n_head, bias=False)  # W_beta, eq. 9
        self.decay = nn.Linear(c.n_embd, c.n_head, bias=False)  # W_a, eq. 9
        rate = torch.empty(c.n_head).uniform_(0, 16).clamp(min=1e-8)
        self.log_rate = nn.Parameter(rate.log())  # A in eq. 9; initialized as in Gated DeltaNet
        dt = torch.empty(c.n_head).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt, as in Gated DeltaNet

    def write_gate(self, normed):
        """Return beta (..., H), eq. 9. normed: RMSNorm of the grounded state, (..., C)."""
        return torch.sigmoid(at_least_fp32(self.beta(normed)))

    def log_decay(self, normed):
        """Return gamma (..., H), eq. 9, with the official bias. normed: as in `write_gate`."""
        a = at_least_fp32(self.decay(normed))  # in fp32: bf16 would round a slow head's e^-0.001 to 1
        return -self.log_rate.exp() * F.softplus(a + self.dt_bias)

    def forward(self, last, g):
        """Return k (B, H, K), v (B, H, D), beta and decay (B, H), as `delta_rule` takes them.

        last, g: previous and current grounded state, (B, C), in fp32 or wider.
        """
        def heads(x):  # (B, H size) -> (B, H, size)
            return x.to(g.dtype).unflatten(-1, (self.n_head, -1))

        normed = self.norm(g)
        k, v = heads(self.key(self.norm(last))), heads(self.value(normed))
        return k, v, self.write_gate(normed), self.log_decay(normed).exp()


class Layer(nn.Module):
    """One prediction layer: gated input + feed-forward net + read from the memory."""

    def __init__(self, config):
        super().__init__()
        c, self.n_head, C = config, config.n_head, config.n_embd
        self.gate_norm = RMSNorm(C, c.norm_eps)
        self.gate = nn.Linear(C, C)  # Gate_p
        self.ffn_norm = RMSNorm(C, c.norm_eps)
        self.gate_up = nn.Linear(C, 2 * c.n_ffn, bias=False)  # W_1^g, W_1^v
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)  # W_2, eq. 5
        if c.n_head:
            self.read_norm = RMSNorm(C, c.norm_eps)
            self.query = nn.Linear(C, c.n_head * c.d_k)  # W_q, eq. 8
            self.read_gate = nn.Linear(C, c.n_head * c.d_v, bias=False)  # W_rg, eq. 11
            self.out_norm = RMSNorm(c.n_head * c.d_v, c.norm_eps)
            self.read_out = nn.Linear(c.n_head * c.d_v, C, bias=False)  # W_o, eq. 11
            self.delta_rule = delta_rule
            if delta and c.scan == 'auto':  # kernels for a GPU, unless `delta_rule` or a function it calls is edited
                self.delta_rule = delta.fast_on_gpu(delta_rule, read, key_of, l2_normalize)

    def forward(self, x, memory, to_write=None):
        """Apply eq. 7 (eq. 5 without memory). Returns the layer's output (B, C) and the memory.

        x: grounded state or layer below, (B, C); to_write: results of `Write`, written before the
        read, or None.
        """
        ffn_gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        gate = torch.sigmoid(self.gate(self.gate_norm(x)).to(x.dtype))  # in fp32, as in `Model.ground`
        y = gate * x + self.ffn_out(F.silu(ffn_gate) * up)  # Gate_p, FFN
        if self.n_head == 0:
            return y, memory
        normed = self.read_norm(x)
        q = self.query(normed).to(x.dtype).unflatten(-1, (self.n_head, -1))
        if to_write is None:
            memory_read = read(memory, key_of(q))
        else:
            memory, memory_read = self.delta_rule(memory, *to_write, q)
        memory_read = self.out_norm(memory_read.flatten(1))  # RMS in eq. 11, over all heads at once
        return y + self.read_out(F.silu(self.read_gate(normed)) * memory_read), memory  # MemRead, eq. 11


class Model(nn.Module):
    write_type = Write  # for subclasses, see papers/gpn/edits/
    sequential = True  # `extend` runs token by token, so verifying drafts saves no time

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_emb)
        self.embed_norm = RMSNorm(c.d_emb, c.norm_eps)
        self.fuse = nn.Linear(c.d_emb, c.n_embd, bias=False)  # W_fuse, eq. 4
        self.ground_norm = RMSNorm(c.n_embd, c.norm_eps)
        self.ground_gate = nn.Linear(c.n_embd, c.n_embd)  # W_f, eq. 4
        self.write = self.write_type(c) if c.n_head else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        # W_dec of eq. 6 is head.weight @ decode.weight; the head is tied (official code)
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.decode = nn.Linear(c.n_embd, c.d_emb, bias=c.decoder_bias)
        self.head = nn.Linear(c.d_emb, c.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(c.vocab_size)
        self.init_weights()
        self.fast = recurrent is not None and c.scan == 'auto'  # scans/recurrent.py may train it

    def init_weights(self):
        """Initialize all weights as in the official code."""
        for name, p in self.named_parameters():
            if name.endswith(('.bias', 'ground_gate.weight', '.gate.weight', 'ffn_out.weight')):
                nn.init.zeros_(p)
            elif name.startswith('embed.') or name.endswith('read_out.weight'):
                nn.init.normal_(p, std=self.config.init_std)
            elif p.dim() == 2:
                init_linear(p)

    # ---- the paper's equations ----

    def ground_input(self, idx):
        """Return u = W_fuse RMSNorm(emb(x_t)), a term of eq. 4. idx: (B, n) -> u: (B, n, C)."""
        return self.fuse(self.embed_norm(self.embed(idx)))

    def ground(self, u, s):
        """Return g, eq. 4, from the previous predicted state s and the token's u. All (B, C)."""
        gate = torch.sigmoid(self.ground_gate(self.ground_norm(s)).to(s.dtype))  # in fp32: bf16 rounds 0.999 to 1
        return gate * s + u  # Gate_f

    def predict(self, last, g, memory):
        """Return s (B, C), new M; eq. 5, 7 to 11. last, g: previous and current grounded state."""
        s, to_write = g, self.write(last, g) if self.write else None
        for layer in self.layers:
            s, memory = layer(s, memory, to_write)
            to_write = None  # the first layer writes, and all read
        return s, memory

    def step(self, u, s, g, memory):
        """Return s, g, M after a token. u: (B, C); s, g, memory: after the previous token."""
        last, g = g, self.ground(u, s)  # eq. 1
        s, memory = self.predict(last, g, memory)  # eq. 2
        return s, g, memory

    def head_input(self, s):
        """Return the head's inputs (..., E), eq. 6 up to the embedding table. s: (..., C)."""
        return self.decode(self.norm(s))

    def first_state(self, batch_size, device=None):
        """Return s, g, M at the start of a document: zeros, in fp32 or wider."""
        c, weight = self.config, self.fuse.weight
        wide = dict(device=device or weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        s = torch.zeros(batch_size, c.n_embd, **wide)
        return s, torch.zeros_like(s), torch.zeros(batch_size, c.n_head, c.d_k, c.d_v, **wide)

    @outside_graphs  # torch.compile would unroll all T steps; only `step` is compiled
    def loop(self, u, carry_mask=None, compile_step=False):
        """Apply `step` to T tokens. Returns the predicted states, (B, T, C).

        u: (B, T, C). The backward pass recomputes one segment of steps at a time.
        """
        c, T, first = self.config, u.shape[1], self.first_state(len(u), u.device)
        step = torch.compile(self.step) if compile_step else self.step

        def segment(start, *state):
            states = []
            for t in range(start, min(start + c.segment_len, T)):
                if t > 0 and c.bptt_len and t % c.bptt_len == 0:
                    state = [x.detach() for x in state]
                if carry_mask is not None:
                    state = choose_rows(carry_mask[:, t], state, first)
                state = step(u[:, t], *state)
                states.append(state[0])
            return torch.stack(states, 1), *state

        run = functools.partial(checkpoint, segment, use_reentrant=False) if torch.is_grad_enabled() else segment
        state, states = first, []
        with torch.autocast('cpu', enabled=False):  # on CPU, bf16 is slower here and less exact
            for start in range(0, T, c.segment_len):
                part, *state = run(start, *state)
                states.append(part)
        return torch.cat(states, 1)

    # ---- training ----

    def states(self, idx, use_scan=False):
        """Return the predicted states (B, T, C), in fp32 or wider. idx: (B, T).

        use_scan: run scans/recurrent.py, which takes up to 15 s for the first batch of a shape.
        """
        c, u, carry_mask = self.config, self.ground_input(idx), None
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        if c.eos_id is not None:
            carry_mask = F.pad(idx[:, :-1] != c.eos_id, (1, 0), value=True)
        if use_scan and self.fast and recurrent.runs_on(u.device):
            first = self.first_state(len(u))
            return recurrent.scan(self, self.step, [u], first, carry_mask, c.segment_len, c.bptt_len)
        return self.loop(u, carry_mask, compile_step=torch.compiler.is_compiling())  # True while this line is traced

    def final_hidden(self, idx, use_scan=False):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, E)."""
        return self.head_input(self.states(idx, use_scan))

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, nats per token (eq. 3). idx, targets: (B, T); -1 is ignored."""
        targets = counted_targets(idx, targets, self.config.eos_id)
        rows = (self.final_hidden(idx, use_scan=True).flatten(0, 1), targets.flatten())
        total = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        loss = total['nll'] / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': loss.detach()}

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, E); targets: (N,)."""
        return {'nll': self.cross_entropy(self._logits(h), targets)}

    def _logits(self, h):
        """Return logits over all V rows, for the loss and decoding. h: (..., E)."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    # ---- decoding ----

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty cache: each row's states after its last tokens, for any max_tokens."""
        state = _join(self.first_state(batch_size, device))
        return StateCache({'state': state.repeat(1, max_call + 1, 1)}, max_call)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n), for any n; return next-token logits as in model_standard.py."""
        c, n, states = self.config, tokens.shape[1], []
        first = self.first_state(len(tokens), tokens.device)
        u = self.ground_input(tokens).to(first[0].dtype)
        with torch.autocast(u.device.type, enabled=False):  # products in the dtype of the weights
            for t in range(n):  # rows whose tokens have ended (t >= lengths) store their state again, see `begin`
                cache.begin(1, None if lengths is None else (t < lengths).long())  # 0 tokens if t is padding
                if t == 0:
                    state = _split(cache.last('state', 1), first)
                new = self.step(u[:, t], *state)
                states.append(new[0])
                if c.eos_id is not None:
                    new = choose_rows(tokens[:, t] == c.eos_id, first, new)  # the next token starts a document
                state = new if lengths is None else choose_rows(cache.n_new > 0, new, state)
                may_be_needed = lengths is not None or n - t <= cache.size  # older ones are replaced in this call
                if may_be_needed:
                    cache.push('state', _join(state))
                cache.lengths += cache.n_new
        h = self.head_input(torch.stack(states, 1))
        if not all_positions:
            h = h[:, -1] if lengths is None else h[cache.batch_idx[:, 0], lengths - 1]
        return mask_padding(self._logits(h), self.config.n_ids)

    @property
    def memory_cells(self):
        """Return the number of values in the matrix memory of a sequence, H K D."""
        return self.config.n_head * self.config.d_k * self.config.d_v

    def flops_per_token(self, T):
        """Return training FLOPs per token: 6 per linear weight, plus the memory's products."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        uses = 2 + self.config.n_layer  # of each cell: a read with the key, a write, and a read per layer
        return 6 * (weights + uses * self.memory_cells)


def choose_rows(mask, a, b):
    """Return the rows of tensors a where mask (B,) is True, else those of b. Tensors: (B, ...)."""
    return [torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(a, b)]


def _join(state):
    """Return the tensors of a state as one, (B, 1, values), which is faster to store."""
    return torch.cat([x.flatten(1) for x in state], 1).unsqueeze(1)


def _split(joined, first):
    """Return the state that `_join` joined, tensors of the shapes of `first`."""
    parts = joined.split([x[0].numel() for x in first], -1)
    return [part.view_as(x) for part, x in zip(parts, first)]
