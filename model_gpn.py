"""The Grounded Prediction Network ("A Single-Layer Model Can Do Language Modeling", arXiv 2605.10643).

One state vector is all the working context there is. Each token grounds it (a gate lets through what was predicted, the
token is added), a feed-forward net and a read from one matrix memory then predict the next state, which is decoded into
the next token and carried on. The memory is written once a token, by the gated delta rule: the key is the last grounded
state, the value this one.

Read `Write`, `Layer` and `Model.step`, which are the paper's equations, then `Model.loop`, which repeats them over
tokens. Nothing else is needed to train, evaluate and decode. scans/gpn.py computes the same function faster;
`Model.choose_scan` compares the two and takes it only where they agree: edit an equation and your equation runs.
RMSNorms before each matrix, also where eq. 4, 8, 9 and 11 show none (the paper has those of gates and of the
feed-forward net), and biases of gates, queries, keys and decay are the official code's. `extend` and `Cache` are
decoding.

    B  batch      T  positions      C  width of the state, n_embd (d in the paper)    E  width of the embedding, d_emb
    L  layers     F  feed-forward width, n_ffn       H  memory heads                  V  vocabulary rows, padded
    K  d_k, rows of a head's memory: its keys        D  d_v, its columns: its values  M  the memory (B, H, K, D)
    s  predicted state s^p (B, C)                    g  grounded state s^g (B, C)     x_t  token t
    u  what a token adds to the state (B, C)         n  positions of one `extend` call
    carry_mask  1 where state and memory go on, 0 where a document starts             active  rows that take this step
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import choose_scan, import_scan, linear_cross_entropy, outside_graphs, rms_norm

fast = import_scan('gpn')  # None where the folder scans/ has been removed


@dataclass
class Config:
    n_layer: int = 1  # layers a token passes, L; they share one state and one memory
    n_head: int = 15  # memory heads, H; 0: no memory (the paper's GPN; with one it is GPN+M)
    n_embd: int = 2496  # width of the state, C
    d_emb: int = 768  # width of the token embedding, the output head too, E (inferred: table 1 has 130M with it)
    d_k: int = 128  # size of a memory head's keys, K
    d_v: int = 256  # size of a memory head's values, D
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd in whole 128s (inferred from 6656 at 2496)
    bptt_len: int | None = None  # the gradient goes back through so many steps at most, cut at multiples; None: all
    segment_len: int = 32  # steps that the backward recomputes at once: fewer or more only change memory and time
    scan: str = 'auto'  # loop: the equations as they read; fast: scans/gpn.py, unchecked; auto: fast where both agree
    decoder_bias: bool = False  # a learned bias of the decoded vector (section 7.2; its place: official code)
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial embedding and memory output; others: `init_linear`
    vocab_size: int = 32000  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 32000  # real token ids; rows from here on are padding
    eos_id: int | None = None  # the id that ends a document: state and memory start anew; None: never (official code)

    def __post_init__(self):
        for name in ('n_layer', 'n_embd', 'd_emb', 'd_k', 'd_v', 'segment_len', 'n_ids', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        if self.n_head < 0:
            raise ValueError(f'n_head = {self.n_head}: expected a number of memory heads, 0 for no memory')
        for name in ('n_ffn', 'bptt_len'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at least 1, or None')
        if self.scan not in ('auto', 'loop', 'fast'):
            raise ValueError(f"scan = {self.scan!r}: expected 'auto', 'loop' or 'fast'")
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or max(1, round(8 / 3 * self.n_embd / 128)) * 128


def init_linear(weight):
    """JAX's lecun_normal, for weight (outputs, inputs): a normal cut at two of its standard deviations.

    It is as much wider as the cut makes it narrower, so that the weights' standard deviation is 1 / sqrt(inputs).
    """
    std = weight.shape[1] ** -0.5 / 0.87962566103423978  # a standard normal's, cut at 2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        """x (..., C), a state in fp32 at least -> (..., C) in the weights' dtype, which products are in."""
        return rms_norm(x, self.weight, self.eps).to(self.weight.dtype)


KEY_EPS = 1e-6  # its square is added under the root (official code); scans/gpn.py reads it as `Model.all_eps`


def l2_normalize(x):
    """x (..., K) over its length."""
    return x * (x.square().sum(-1, keepdim=True) + KEY_EPS ** 2).rsqrt()


def read(memory, x):
    """M^T x of each head, M x in the paper: memory (B, H, K, D), x (B, H, K) -> (B, H, D).

    Autocast would make a matrix product bf16.
    """
    return (memory * x.unsqueeze(-1)).sum(-2)


class Write(nn.Module):
    """MemWrite: the transition from the last grounded state to this one, by the gated delta rule, eq. 8 to 10."""

    def __init__(self, config):
        super().__init__()
        c, self.n_head = config, config.n_head
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.key = nn.Linear(c.n_embd, c.n_head * c.d_k)  # W_k and
        self.value = nn.Linear(c.n_embd, c.n_head * c.d_v, bias=False)  # W_v, eq. 8
        self.beta = nn.Linear(c.n_embd, c.n_head, bias=False)  # W_beta and
        self.decay = nn.Linear(c.n_embd, c.n_head, bias=False)  # W_a, eq. 9
        rate = torch.empty(c.n_head).uniform_(0, 16).clamp(min=1e-8)
        self.log_rate = nn.Parameter(rate.log())  # A in eq. 9; initial values as Gated DeltaNet
        dt = torch.empty(c.n_head).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus gives dt, as Gated DeltaNet

    def write_gate(self, g):
        """beta (..., H) of grounded states g (..., C), eq. 9."""
        return torch.sigmoid(self.beta(self.norm(g)).to(g.dtype))

    def log_decay(self, g):
        """gamma (..., H) of grounded states g (..., C), eq. 9; the bias is the official code's."""
        a = self.decay(self.norm(g)).to(g.dtype)  # wide: a slow head's e^-0.001 would be 1 in bf16
        return -self.log_rate.exp() * F.softplus(a + self.dt_bias)

    def forward(self, last, g, memory):
        """Grounded states of the last token and of this one (B, C), M (B, H, K, D) -> M of this token."""
        def heads(x):  # (B, H size) -> (B, H, size), in the memory's dtype
            return x.to(memory.dtype).unflatten(-1, (self.n_head, -1))

        k = l2_normalize(F.relu(heads(self.key(self.norm(last)))))  # eq. 8
        v = heads(self.value(self.norm(g)))
        beta, decay = self.write_gate(g).unsqueeze(-1), self.log_decay(g).exp().unsqueeze(-1)  # (B, H, 1)
        error = v - read(memory, k)
        return decay.unsqueeze(-1) * memory + k.unsqueeze(-1) * (beta * error).unsqueeze(-2)  # eq. 10


class Layer(nn.Module):
    """Predicts the next state: what the gate carries over, the feed-forward net and a read from the memory, summed."""

    def __init__(self, config):
        super().__init__()
        c, self.n_head, C = config, config.n_head, config.n_embd
        self.gate_norm, self.gate = RMSNorm(C, c.norm_eps), nn.Linear(C, C)  # of Gate_p
        self.ffn_norm, self.gate_up = RMSNorm(C, c.norm_eps), nn.Linear(C, 2 * c.n_ffn, bias=False)  # W_1^g, W_1^v and
        self.ffn_out = nn.Linear(c.n_ffn, C, bias=False)  # W_2, eq. 5
        if c.n_head:
            self.read_norm, self.query = RMSNorm(C, c.norm_eps), nn.Linear(C, c.n_head * c.d_k)  # W_q, eq. 8
            self.read_gate = nn.Linear(C, c.n_head * c.d_v, bias=False)  # W_rg and
            self.out_norm = RMSNorm(c.n_head * c.d_v, c.norm_eps)
            self.read_out = nn.Linear(c.n_head * c.d_v, C, bias=False)  # W_o, eq. 11

    def forward(self, x, memory):
        """x (B, C), the grounded state or the layer before, M (B, H, K, D) -> (B, C); eq. 7, without memory eq. 5."""
        ffn_gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        gate = torch.sigmoid(self.gate(self.gate_norm(x)).to(x.dtype))  # wide, as in `Model.ground`
        y = gate * x + self.ffn_out(F.silu(ffn_gate) * up)  # Gate_p, FFN
        if self.n_head == 0:
            return y
        x_normed = self.read_norm(x)
        q = l2_normalize(F.relu(self.query(x_normed).to(memory.dtype).unflatten(-1, (self.n_head, -1))))
        memory_read = self.out_norm(read(memory, q).flatten(1))  # RMS in eq. 11, over all heads
        return y + self.read_out(F.silu(self.read_gate(x_normed)) * memory_read)  # MemRead, eq. 11


class Model(nn.Module):
    write_type = Write  # a subclass may have another: analysis/gpn_edits.py

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_emb)
        self.embed_norm, self.fuse = RMSNorm(c.d_emb, c.norm_eps), nn.Linear(c.d_emb, c.n_embd, bias=False)  # W_fuse
        self.ground_norm, self.ground_gate = RMSNorm(c.n_embd, c.norm_eps), nn.Linear(c.n_embd, c.n_embd)  # W_f, eq. 4
        self.write = self.write_type(c) if c.n_head else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        # W_dec of eq. 6 is head.weight @ decode.weight: through the embedding's width, and tied to it (official code)
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.decode = nn.Linear(c.n_embd, c.d_emb, bias=c.decoder_bias)
        self.head = nn.Linear(c.d_emb, c.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.scan_report = None  # what `choose_scan` found
        for name, p in self.named_parameters():  # as the official code
            if name.endswith(('.bias', 'ground_gate.weight', '.gate.weight', 'ffn_out.weight')):
                nn.init.zeros_(p)
            elif name.startswith('embed.') or name.endswith('read_out.weight'):
                nn.init.normal_(p, std=c.init_std)
            elif p.dim() == 2:
                init_linear(p)

    # ---- the paper's equations ----

    def ground_input(self, idx):
        """W_fuse RMSNorm(emb(x_t)): what each token adds to the state in eq. 4. The RMSNorm is the official code's.

        idx (B, n) -> u (B, n, C).
        """
        return self.fuse(self.embed_norm(self.embed(idx)))

    def ground(self, u, s):
        """The state predicted before, s (B, C), and what a token adds to it, u (B, C) -> g (B, C); eq. 4.

        States are fp32 with weights of bf16 too: what a norm returns has the dtype of the weights.
        """
        gate = torch.sigmoid(self.ground_gate(self.ground_norm(s)).to(s.dtype))  # wide: 0.999 would be 1 in bf16
        return gate * s + u  # Gate_f

    def predict(self, last, g, memory):
        """Grounded states of the last token and of this one (B, C), M before it -> s (B, C), M; eq. 5, 7 to 11."""
        if self.write is not None:
            memory = self.write(last, g, memory)
        s = g
        for layer in self.layers:
            s = layer(s, memory)
        return s, memory

    def step(self, u, s, g, memory):
        """One token: u (B, C) from `ground_input`; s, g, M of the token before, zeros at first -> its s, g, M."""
        last, g = g, self.ground(u, s)  # eq. 1
        s, memory = self.predict(last, g, memory)  # eq. 2
        return s, g, memory

    def head_input(self, s):
        """W_dec RMSNorm(s) of eq. 6 up to the embedding's table, which `head` is. s (..., C) -> (..., E)."""
        return self.decode(self.norm(s))

    def first_state(self, batch_size, device=None):
        """s, g and M before a document's first token: zeros, in fp32 at least."""
        c, weight = self.config, next(self.parameters())
        wide = dict(device=device or weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        s = torch.zeros(batch_size, c.n_embd, **wide)
        return s, torch.zeros_like(s), torch.zeros(batch_size, c.n_head, c.d_k, c.d_v, **wide)

    @outside_graphs  # a compiler would unroll all T steps: it gets `step` alone
    def loop(self, u, carry_mask=None, active=None, state=None, compiled=False):
        """`step` for each of n tokens, from state (s, g, M), None for that of a document's start.

        u (B, n, C); carry_mask (B, n, 1), 0 where a document starts, or None; active (B, n), where a row takes the
        token, or None for all. Returns the predicted states (B, n, C), and s, g, M after them. For the backward only s,
        g and M at the start of each segment are held; its steps are taken a second time.
        """
        step = torch.compile(self.step) if compiled else self.step
        state, states = state or self.first_state(len(u), u.device), []
        with torch.autocast('cpu', enabled=False):  # on CPU bf16 would be slower here, and less exact
            for start in range(0, u.shape[1], self.config.segment_len):
                segment = step, start, u, carry_mask, active, *state
                if torch.is_grad_enabled():
                    part, *state = checkpoint(self._segment, *segment, use_reentrant=False)
                else:
                    part, *state = self._segment(*segment)
                states.append(part)
        return torch.cat(states, 1), state

    def _segment(self, step, start, u, carry_mask, active, *state):
        """Steps of `loop` from `start` on, segment_len at most -> their states (B, S, C) and the last s, g, M."""
        c, states, first = self.config, [], self.first_state(len(u), u.device)
        for t in range(start, min(start + c.segment_len, u.shape[1])):
            if t > 0 and c.bptt_len and t % c.bptt_len == 0:
                state = [x.detach() for x in state]
            before = state if carry_mask is None else start_documents(state, first, carry_mask[:, t])
            new = step(u[:, t], *before)
            state = new if active is None else choose_rows(active[:, t], new, state)
            states.append(state[0])
        return torch.stack(states, 1), *state

    # ---- training ----

    @property
    def all_eps(self):
        """The two eps that scans/gpn.py takes from here, as no check could see others: of RMSNorms, and of keys."""
        return [self.config.norm_eps, KEY_EPS]

    @outside_graphs
    def choose_scan(self):
        """Decides whether the equations run or scans/gpn.py: the report of `attn_kernels.choose_scan`.

        It happens at the first use, and again on another type of device. Call it after a new module or hook.
        """
        for_the_check = dict(segment_len=4) | (dict(bptt_len=5) if self.config.bptt_len else {})
        self.scan_report = choose_scan(self, fast, **for_the_check)
        if fast is not None:
            fast.forget_graphs()  # of the check's few tokens
        return self.scan_report

    @property
    def reads_weights(self):
        """Whether it multiplies by weights without calling the layers, as scans/gpn.py does."""
        return self.scan_report is not None and self.scan_report['scan'] == 'fast'

    def _uses_fast_form(self):
        if self.scan_report is None or self.scan_report['device'] != next(self.parameters()).device.type:
            self.choose_scan()
        return self.scan_report['scan'] == 'fast'

    def states(self, idx):
        """The predicted states (B, T, C) of windows idx (B, T), fp32 at least, in the form `choose_scan` chose."""
        u, carry_mask = self.ground_input(idx), None
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        if self.config.eos_id is not None:
            carry_mask = F.pad(idx[:, :-1] != self.config.eos_id, (1, 0), value=True).to(u.dtype).unsqueeze(-1)
        if self._uses_fast_form():
            return fast.scan_window(self, u, carry_mask)
        return self.loop(u, carry_mask, compiled=torch.compiler.is_compiling())[0]

    def cached_states(self, idx):
        """`states`, as decoding gives them, of a prompt and then of single tokens: what `choose_scan` compares besides.

        idx (B, T) -> (B, T, C).
        """
        cache, states = self.new_cache(*idx.shape, max_run=2), []
        for tokens in (idx[:, :5], *idx[:, 5:].split(1, 1)):
            n_new = torch.full_like(cache.lengths, tokens.shape[1])
            states.append(cache.append(tokens, self.ground_input(tokens), n_new)[0])
        return torch.cat(states, 1)

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, E)."""
        return self.head_input(self.states(idx))

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token, eq. 3.

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
        """What the head makes of h (..., E). Training's loss does not pass here: an edit belongs in `forward` too."""
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    # ---- decoding ----

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows. It has the same size for any max_tokens, and keeps state and memory in
        fp32.

        The fast form makes its weights ready here: a cache made before they change goes on with the old ones.
        """
        weight = next(self.parameters())
        device, dtype = device or weight.device, dtype or weight.dtype
        decoder = fast.Decoder(self, device) if self._uses_fast_form() else LoopDecoder(self, device)
        return Cache(self.config, decoder, batch_size, max_tokens, max_run, device, dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions. Prefill,
        decoding and the verification of a draft are this one call. Shapes are static for a given n, and
        nothing waits for the device.
        """
        n_new = torch.full_like(cache.lengths, tokens.shape[1]) if lengths is None else lengths
        states, tail_idx = cache.append(tokens, self.ground_input(tokens), n_new)
        h = self.head_input(states)
        last = cache.end(h, tail_idx)
        return self._logits(h if all_positions else last)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token: weights (2 forward, 4 backward), and the memory's products.

        These are the write's error and update, 3 times that in the backward and once more to recompute, and a read of
        each layer, 2 times that in the backward.
        """
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + c.n_head * c.d_k * c.d_v * (4 * 5 + 6 * c.n_layer)


def start_documents(state, first, carry_mask):
    """s, g, M as tensors (B, ...), those of `first` in rows where carry_mask (B, 1) is 0."""
    return choose_rows(carry_mask[:, 0] > 0, state, first)


def choose_rows(mask, a, b):
    """Tensors (B, ...): rows of those in a where mask (B,), else of those in b."""
    return [torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(a, b)]


class LoopDecoder:
    """Decoding by `Model.loop`. scans.gpn.Decoder is the same on folded weights."""

    def __init__(self, model, device):
        self.model, self.device = model, device

    def first_state(self, batch_size):
        return self.model.first_state(batch_size, self.device)

    def steps(self, state, u, carry_mask, active):
        """Next tokens of each row: u (B, n, C), carry_mask (B, n, 1), active (B, n) -> states (B, n, C), new state."""
        return self.model.loop(u, carry_mask, active, state)


class Cache:
    """State and memory of each row, of one size for any number of tokens, and what a rollback needs.

        new tokens of a row   [ early | tail: the last max_run ]
                                      ^ snapshot of state and memory

    `rollback(n)` goes back to the snapshot and takes the tail once more, without its last n tokens.
    """

    def __init__(self, config, decoder, batch_size, max_tokens, max_run, device, dtype):
        self.max_tokens, self.max_run, self.eos_id, self.decoder = max_tokens, max_run, config.eos_id, decoder
        self.state = [x.clone() for x in decoder.first_state(batch_size)]
        self.snapshot = [x.clone() for x in self.state]  # before the tail
        wide = dict(device=device, dtype=self.state[0].dtype)
        self.tail_u = torch.zeros(batch_size, max_run, config.n_embd, **wide)
        self.tail_carry = torch.ones(batch_size, max_run, 1, **wide)
        self.tail_len = torch.zeros(batch_size, device=device, dtype=torch.int64)
        self.ended = torch.zeros(batch_size, device=device, dtype=torch.bool)  # the row's last token ended a document
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.hidden = torch.zeros(batch_size, max_run, config.d_emb, device=device, dtype=dtype)  # of the last call
        self.batch_idx = torch.arange(batch_size, device=device).unsqueeze(1)

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(x.nbytes for value in vars(self).values() for x in (value if isinstance(value, list) else [value])
                   if isinstance(x, torch.Tensor))

    def advance(self, u, carry_mask, active):
        """Takes n tokens where active (B, n): u (B, n, C), carry_mask (B, n, 1) -> the states after them (B, n, C)."""
        if u.shape[1] == 0:
            return u
        states, new = self.decoder.steps(self.state, u, carry_mask, active)
        for own, x in zip(self.state, new):
            own.copy_(x)  # the same tensors each time, as a CUDA graph needs
        return states

    def append(self, tokens, u, n_new):
        """Takes n_new (B,) of tokens (B, n), u (B, n, C) -> the states after them (B, n, C), and which are of the tail.

        These are positions (B, m), m = min(n, max_run). Beyond a row's tokens the states mean nothing.
        """
        n, m = tokens.shape[1], min(tokens.shape[1], self.max_run)
        u, position = u.to(self.tail_u.dtype), torch.arange(n, device=u.device)
        carry_mask = torch.ones_like(u[..., :1])
        if self.eos_id is not None:
            ends = tokens == self.eos_id
            carry_mask = 1 - torch.cat([self.ended[:, None], ends[:, :-1]], 1).to(u.dtype).unsqueeze(-1)
            self.ended.copy_(ends[self.batch_idx[:, 0], n_new - 1])
        tail_start = (n_new - self.max_run).clamp(min=0)
        early = self.advance(u[:, :n - m], carry_mask[:, :n - m], position[:n - m] < tail_start[:, None])
        for saved, x in zip(self.snapshot, self.state):
            saved.copy_(x)
        self.tail_len.copy_(n_new - tail_start)
        tail_idx = (tail_start[:, None] + position[:m]).clamp(max=n - 1)
        self.tail_u[:, :m], self.tail_carry[:, :m] = u[self.batch_idx, tail_idx], carry_mask[self.batch_idx, tail_idx]
        tail = self.advance(self.tail_u[:, :m], self.tail_carry[:, :m], position[:m] < self.tail_len[:, None])
        self.lengths += n_new
        if n == m:
            return tail, tail_idx
        # [early | tail] -> positions: a row's tail starts at tail_start
        place = torch.where(position < tail_start[:, None], position, n - m + position - tail_start[:, None])
        return torch.cat([early, tail], 1)[self.batch_idx, place.clamp(max=n - 1)], tail_idx

    def end(self, h, tail_idx):
        """Keeps what the head multiplies (B, n, C) of the tail (B, m); returns that of each row's last token (B, C)."""
        tail = h if h.shape[1] == tail_idx.shape[1] else h[self.batch_idx, tail_idx]
        self.hidden[:, :tail.shape[1]] = tail
        return tail[self.batch_idx[:, 0], self.tail_len - 1]

    @torch.no_grad()
    def rollback(self, n):
        """Forgets the last n tokens of the last call: n an int, or (B,) int64 with one count a row."""
        self.tail_len -= n
        self.lengths -= n
        goes_back = torch.zeros_like(self.tail_len) + n > 0
        for own, x in zip(self.state, choose_rows(goes_back, self.snapshot, self.state)):
            own.copy_(x)
        first_forgotten = self.tail_len.clamp(max=self.max_run - 1)
        starts_document = self.tail_carry[self.batch_idx[:, 0], first_forgotten, 0] == 0
        self.ended.copy_(torch.where(goes_back, starts_document, self.ended))
        longest = self.max_run - 1
        if self.tail_len.device.type == 'cpu':  # on a GPU to look at a length would mean to wait
            longest = int((self.tail_len * goes_back).max())
        again = torch.arange(longest, device=self.tail_len.device) < self.tail_len[:, None]
        self.advance(self.tail_u[:, :longest], self.tail_carry[:, :longest], again & goes_back[:, None])
