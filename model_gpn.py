"""The Grounded Prediction Network ("A Single-Layer Model Can Do Language Modeling", arXiv 2605.10643).

One state vector is all the working context there is. Each token grounds it (a gate lets through what was predicted, the token is
added), a feed-forward net and a read from one matrix memory then predict the next state, which is decoded into the next token and
carried on. The memory is written once a token, by the gated delta rule: the key is the last grounded state, the value this one.

Read `Write`, `Layer` and `Model.step`, which are the paper's equations, and `Model.loop`, which repeats them over a window. The
rest is the same arithmetic made fast: `step` on weights whose norms are folded in, `scan` over a window, and its gradient
`scan_backward`, where only the state's gradient goes back through time.

    B  batch      T  positions      C  width of the state, n_embd (d in the paper)    E  width of the embedding, d_emb
    L  layers     F  feed-forward width, n_ffn       H  memory heads                  V  vocabulary rows, padded
    K  d_k, rows of a head's memory: its keys        D  d_v, its columns: its values  M  the memory (B, H, K, D)
    s  predicted state s^p (B, C)                    g  grounded state s^g (B, C)     x_t  token t

What training holds, in numbers, for R = T / S segments of S = segment_len steps: states L T B C, products T B W with
W = C + L (C + 2F) + H ((L + 1) K + (2L + 1) D + 2), M at segment starts R B H K D; and in the backward (S + 1) B H K D for M
in one segment and a few times S B W for what its steps need. M at every step, T B H K D, is never there.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import linear_cross_entropy, rms_norm
from scans.gpn import Sizes, Weights, scan, steps


@dataclass
class Config:
    n_layer: int = 1  # layers a token passes, L; they share one state and one memory
    n_head: int = 15  # memory heads, H; 0: no memory (the paper's GPN; with one it is GPN+M)
    n_embd: int = 2496  # width of the state, C
    d_emb: int = 768  # width of the token embedding, which is the output head too, E (official code)
    d_k: int = 128  # size of a memory head's keys, K
    d_v: int = 256  # size of a memory head's values, D
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd in whole 128s (official code)
    bptt_len: int | None = None  # the gradient goes back through so many steps at most, cut at multiples; None: the whole window
    segment_len: int = 32  # steps between saved memories: the backward recomputes M in segments; fewer or more only change memory and time
    decoder_bias: bool = False  # a learned bias of the decoded vector (section 7.2)
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial embedding and memory output; the others: 1 / sqrt(inputs)
    vocab_size: int = 32000  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 32000  # real token ids; rows from here on are padding
    eos_id: int | None = None  # the id that ends a document: state and memory start anew after it; None: never, as in the paper

    def __post_init__(self):
        for name in ('n_layer', 'n_embd', 'd_emb', 'd_k', 'd_v', 'segment_len', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_head < 0:
            raise ValueError(f'n_head = {self.n_head}: expected a number of memory heads, 0 for no memory')
        for name in ('n_ffn', 'bptt_len'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at least 1, or None')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        self.n_ffn = self.n_ffn or max(1, round(8 / 3 * self.n_embd / 128)) * 128


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def l2_norm(x):
    """x (..., K) over its length; 1e-12 under the root is the official code's."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


# ---- the paper's equations ----

class Write(nn.Module):
    """Writes the transition from the last grounded state to this one into the memory: the gated delta rule, eq. 8 to 10."""

    def __init__(self, config):
        super().__init__()
        c, self.shape = config, (config.n_head, -1)
        self.norm = RMSNorm(c.n_embd, c.norm_eps)
        self.key = nn.Linear(c.n_embd, c.n_head * c.d_k)
        self.value = nn.Linear(c.n_embd, c.n_head * c.d_v, bias=False)
        self.beta = nn.Linear(c.n_embd, c.n_head, bias=False)
        self.decay = nn.Linear(c.n_embd, c.n_head, bias=False)
        self.log_rate = nn.Parameter(torch.empty(c.n_head).uniform_(0, 16).clamp(min=1e-8).log())  # A in eq. 9; as Gated DeltaNet
        dt = torch.empty(c.n_head).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus gives dt, as Gated DeltaNet

    def log_decay(self, g):
        """gamma (..., H) of normalised grounded states, eq. 9."""
        return -self.log_rate.exp() * F.softplus(self.decay(g) + self.dt_bias)

    def forward(self, last, g, memory):
        """Grounded states of the last token and of this one (B, C), M (B, H, K, D) -> M of this token."""
        g = self.norm(g)
        k = l2_norm(F.relu(self.key(self.norm(last))).unflatten(-1, self.shape))  # eq. 8
        v = self.value(g).unflatten(-1, self.shape)
        beta = torch.sigmoid(self.beta(g))[..., None, None]
        decay = self.log_decay(g).exp()[..., None, None]
        error = v - torch.einsum('bhkd,bhk->bhd', memory, k)
        return decay * memory + beta * torch.einsum('bhk,bhd->bhkd', k, error)  # eq. 10


class Layer(nn.Module):
    """Predicts the next state, as the sum of what the gate keeps, the feed-forward net and the memory's answer."""

    def __init__(self, config):
        super().__init__()
        c, self.shape = config, (config.n_head, -1)
        norm = lambda width=c.n_embd: RMSNorm(width, c.norm_eps)
        self.gate_norm, self.gate = norm(), nn.Linear(c.n_embd, c.n_embd)
        self.ffn_norm, self.gate_up = norm(), nn.Linear(c.n_embd, 2 * c.n_ffn, bias=False)
        self.ffn_out = nn.Linear(c.n_ffn, c.n_embd, bias=False)
        if c.n_head:
            self.read_norm, self.query = norm(), nn.Linear(c.n_embd, c.n_head * c.d_k)
            self.read_gate = nn.Linear(c.n_embd, c.n_head * c.d_v, bias=False)
            self.answer_norm, self.read_out = norm(c.n_head * c.d_v), nn.Linear(c.n_head * c.d_v, c.n_embd, bias=False)

    def forward(self, x, memory):
        """x (B, C), the grounded state or the layer before, and M (B, H, K, D) -> (B, C); eq. 7, without a memory eq. 5."""
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        y = torch.sigmoid(self.gate(self.gate_norm(x))) * x + self.ffn_out(F.silu(gate) * up)
        if memory is None:
            return y
        n = self.read_norm(x)
        q = l2_norm(F.relu(self.query(n)).unflatten(-1, self.shape))
        answer = torch.einsum('bhkd,bhk->bhd', memory, q).flatten(1)
        return y + self.read_out(F.silu(self.read_gate(n)) * self.answer_norm(answer))  # eq. 11; the norm is over all heads


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_emb)
        self.embed_norm, self.fuse = RMSNorm(c.d_emb, c.norm_eps), nn.Linear(c.d_emb, c.n_embd, bias=False)
        self.ground_norm, self.ground_gate = RMSNorm(c.n_embd, c.norm_eps), nn.Linear(c.n_embd, c.n_embd)
        self.write = Write(c) if c.n_head else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        self.norm, self.decode = RMSNorm(c.n_embd, c.norm_eps), nn.Linear(c.n_embd, c.d_emb, bias=c.decoder_bias)
        self.head = nn.Linear(c.d_emb, c.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        for name, p in self.named_parameters():  # as the official code
            if name.endswith(('.bias', 'ground_gate.weight', '.gate.weight', 'ffn_out.weight')):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=c.init_std if name.startswith('embed') or name.endswith('read_out.weight') else p.shape[1] ** -0.5)

    def step(self, u, s, g, memory, heads_off=None):
        """One token: u (B, C) from `_fused`; s, g, memory of the token before, zeros at first, memory None without -> s, g, memory.

        heads_off: a list of memory heads that stay empty, to see what they are for.
        """
        last, g = g, torch.sigmoid(self.ground_gate(self.ground_norm(s))) * s + u  # eq. 4
        if memory is not None:
            memory = self.write(last, g, memory)
            if heads_off:
                memory[:, heads_off] = 0
        s = g
        for layer in self.layers:
            s = layer(s, memory)
        return s, g, memory

    def loop(self, idx):
        """The predicted states (B, T, C) of windows idx (B, T), step by step: what the scan is, and what it must equal."""
        c, (B, T) = self.config, idx.shape
        u, states = self._fused(idx), []
        s = g = u.new_zeros(B, c.n_embd)
        memory = u.new_zeros(B, c.n_head, c.d_k, c.d_v) if c.n_head else None
        for t in range(T):
            if t and c.bptt_len and t % c.bptt_len == 0:
                s, g, memory = (x if x is None else x.detach() for x in (s, g, memory))
            if t and c.eos_id is not None:
                go_on = (idx[:, t - 1] != c.eos_id)[:, None]
                s, g = s * go_on, g * go_on
                memory = memory if memory is None else memory * go_on[:, :, None, None]
            s, g, memory = self.step(u[:, t], s, g, memory)
            states.append(s)
        return torch.stack(states, 1)

    def _fused(self, idx):
        """What each token adds to the state, W_fuse emb(x_t) in eq. 4. idx (B, n) -> (B, n, C)."""
        return self.fuse(self.embed_norm(self.embed(idx)))

    def _decoded(self, s):
        """States (..., C) -> the vectors (..., E) that the head compares with every token's embedding; eq. 6."""
        return self.decode(self.norm(s.to(self.norm.weight.dtype)))

    # ---- the same, fast ----

    def _folded(self):
        """The weights of `step` and `scan`, the norms' weights in them, as a flat list that `Weights` reads: the ground gate's
        (weight, bias); of each layer one product in (weight, bias) and one out; with a memory the decay rates (H,) and the key
        (H, K) that a zero state gives. Columns of a product in: gate | query | key, value, beta, decay of the write | silu'd | up.
        """
        root = self.config.n_embd ** 0.5  # `unit` is RMSNorm but for this
        fold = lambda linear, norm: linear.weight * (norm.weight * root)
        folded, write = [fold(self.ground_gate, self.ground_norm), self.ground_gate.bias], self.write
        for i, layer in enumerate(self.layers):
            gate, up = fold(layer.gate_up, layer.ffn_norm).chunk(2)
            weights, biases, out = [fold(layer.gate, layer.gate_norm)], [layer.gate.bias], layer.ffn_out.weight
            if write is not None:
                weights.append(fold(layer.query, layer.read_norm))
                biases.append(layer.query.bias)
                gate = torch.cat([gate, fold(layer.read_gate, layer.read_norm)])
                answer_norm = layer.answer_norm.weight * len(layer.answer_norm.weight) ** 0.5
                out = torch.cat([out, layer.read_out.weight * answer_norm], 1)
            if write is not None and i == 0:
                weights += [fold(linear, write.norm) for linear in (write.key, write.value, write.beta, write.decay)]
                biases += [write.key.bias, write.dt_bias.new_zeros(write.value.out_features + write.beta.out_features), write.dt_bias]
            biases.append(up.new_zeros(len(gate) + len(up)))
            folded += [torch.cat([*weights, gate, up]), torch.cat(biases), out]
        if write is not None:
            folded += [write.log_rate.exp(), l2_norm(F.relu(write.key.bias).unflatten(-1, write.shape))]
        return folded

    def states(self, idx):
        """The predicted states (B, T, C) of windows idx (B, T), in fp32 at least: `loop`, by the scan."""
        c, u = self.config, self._fused(idx)
        dtype = torch.get_autocast_dtype('cuda') if u.is_cuda and torch.is_autocast_enabled('cuda') else self.fuse.weight.dtype
        u = u.to(torch.promote_types(u.dtype, torch.float32)).transpose(0, 1).contiguous()
        keep = None
        if c.eos_id is not None:
            keep = F.pad((idx[:, :-1] != c.eos_id).T, (0, 0, 1, 0), value=True).to(u.dtype).unsqueeze(-1)
        return scan(u, keep, self._folded(), Sizes.of(c), c.norm_eps, dtype, c.segment_len, c.bptt_len or idx.shape[1]).transpose(0, 1)

    def _window(self, idx):
        """What the head takes, for whole windows. idx (B, T) -> (B, T, E)."""
        return self._decoded(self.states(idx))

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats a counted token.

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self._window(idx)
        loss = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self._window(idx))

    def _logits(self, h):
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows. It has the same size for any max_tokens, and keeps state and memory in fp32.

        The weights are made ready for decoding here: a cache made before they change goes on with the old ones.
        """
        return Cache(self, batch_size, max_tokens, max_run, device or self.fuse.weight.device, dtype or self.fuse.weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a speculative run are this one call. Shapes are static for a given n, and nothing
        waits for the device.
        """
        n, rows = tokens.shape[1], torch.arange(len(tokens), device=tokens.device)[:, None]
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        u = self._fused(tokens).to(cache.s.dtype)
        keep = torch.ones_like(u[..., :1])
        if self.config.eos_id is not None:
            ends = tokens == self.config.eos_id
            keep = 1 - torch.cat([cache.ended[:, None], ends[:, :-1]], 1).to(u.dtype).unsqueeze(-1)
            cache.ended.copy_(ends[rows[:, 0], run - 1])
        positions, m = torch.arange(n, device=tokens.device), min(n, cache.max_run)
        first = (run - cache.max_run).clamp(min=0)  # the tokens before it cannot be rolled back
        early = cache.advance(u[:, :n - m], keep[:, :n - m], positions[:n - m] < first[:, None])
        cache.snapshot(run - first)
        last = first[:, None] + positions[:m]
        cache.u[:, :m], cache.keep[:, :m] = u[rows, last.clamp(max=n - 1)], keep[rows, last.clamp(max=n - 1)]
        late = cache.advance(cache.u[:, :m], cache.keep[:, :m], positions[:m] < (run - first)[:, None])
        h_last = self._decoded(late)
        cache.lengths += run
        cache.hidden[:, :m] = h_last
        if not all_positions:
            return self._logits(h_last[rows[:, 0], run - first - 1])
        h = h_last
        if n > m:
            h = self._decoded(torch.cat([early, late], 1))
            h = h[rows, torch.where(positions < first[:, None], positions, n - m + positions - first[:, None]).clamp(max=n - 1)]
        return self._logits(h)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token: 6 a weight used (2 forward, 4 backward), and the memory's products: the write's
        error and update, 3 times that in the backward, once more to recompute, and a read of each layer, 2 times in the backward."""
        c = self.config
        modules = [self.fuse, self.ground_gate, self.decode, self.head, *self.layers.modules(), *(self.write.modules() if self.write else ())]
        weights = sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear))
        return 6 * weights + c.n_head * c.d_k * c.d_v * (4 * 5 + 6 * c.n_layer)


class Cache:
    """State, next key and memory of each row, of one size for any number of tokens, and what a rollback needs: a snapshot of them
    from before the last run's last max_run tokens, and these tokens, to be taken again as far as they are kept."""

    def __init__(self, model, batch_size, max_tokens, max_run, device, dtype):
        self.max_tokens, self.max_run, c = max_tokens, max_run, model.config
        self.n_layer, self.segment_len = c.n_layer, c.segment_len
        with torch.no_grad():
            self.weights = Weights([w.to(device, copy=True) for w in model._folded()], Sizes.of(c), c.norm_eps, model.fuse.weight.dtype)
        wide = dict(device=device, dtype=torch.promote_types(model.fuse.weight.dtype, torch.float32))
        self.s = torch.zeros(batch_size, c.n_embd, **wide)
        self.k = self.weights.first_key.expand(batch_size, -1, -1).to(**wide).clone()
        self.memory = torch.zeros(batch_size, c.n_head, c.d_k, c.d_v, **wide)
        self.ended = torch.zeros(batch_size, device=device, dtype=torch.bool)  # the row's last token ended a document
        self.before = [x.clone() for x in (self.s, self.k, self.memory)]  # the snapshot
        self.u = torch.zeros(batch_size, max_run, c.n_embd, **wide)  # of the tokens since then
        self.keep = torch.ones(batch_size, max_run, 1, **wide)  # 0 where one of them starts a document
        self.since = torch.zeros(batch_size, device=device, dtype=torch.int64)  # how many they are
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.hidden = torch.zeros(batch_size, max_run, c.d_emb, device=device, dtype=dtype)  # last run, before the head

    @property
    def nbytes(self):
        return sum(x.nbytes for x in (self.s, self.k, self.memory, self.ended, *self.before, self.u, self.keep, self.since,
                                      self.lengths, self.hidden))

    def advance(self, u, keep, active):
        """n tokens, u (B, n, C) and keep (B, n, 1), where active (B, n). Returns the states after them (B, n, C)."""
        states = [u[:, :0]]
        for a in range(0, u.shape[1], self.segment_len):
            part = [x[:, a:a + self.segment_len].transpose(0, 1) for x in (u, keep, active.unsqueeze(-1))]
            s, k, _, rows = steps(self.weights, self.s, self.k, self.memory, *part)
            self.s.copy_(s)
            self.k.copy_(k)
            states.append(rows[self.n_layer - 1].transpose(0, 1))
        return torch.cat(states, 1)

    def snapshot(self, since):
        for x, now in zip(self.before, (self.s, self.k, self.memory)):
            x.copy_(now)
        self.since.copy_(since)

    @torch.no_grad()
    def rollback(self, n):
        """Forgets the last n tokens of the last run: n an int, or (B,) int64 with one count a row."""
        self.since -= n
        self.lengths -= n
        back, rows = torch.zeros_like(self.since) + n > 0, torch.arange(len(self.since), device=self.since.device)
        for x, old in zip((self.s, self.k, self.memory), self.before):
            x.copy_(torch.where(back.view(-1, *[1] * (x.dim() - 1)), old, x))
        starts = self.keep[rows, self.since.clamp(max=self.max_run - 1), 0] == 0  # the first token that is forgotten
        self.ended.copy_(torch.where(back, starts, self.ended))
        longest = int((self.since * back).max()) if self.since.device.type == 'cpu' else self.max_run - 1
        positions = torch.arange(longest, device=self.since.device)
        self.advance(self.u[:, :longest], self.keep[:, :longest], back[:, None] & (positions < self.since[:, None]))
