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

Memory of a training step, in numbers (R segments of segment_len = S steps, R = T / S; W = C + L (C + 2F) + the memory's columns):
states L T B C, products T B W in the dtype of products, M at segment starts R B H K D, and during the backward (S + 1) B H K D for
M in one segment and about 3 S B W for what its steps need. M at every step, T B H K D, is never there.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import delta_replay, delta_step, delta_step_backward, linear_cross_entropy, rms_norm


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

    def forward(self, last, g, memory):
        """Grounded states of the last token and of this one (B, C), M (B, H, K, D) -> M of this token."""
        g = self.norm(g)
        k = l2_norm(F.relu(self.key(self.norm(last))).unflatten(-1, self.shape))  # eq. 8
        v = self.value(g).unflatten(-1, self.shape)
        beta = torch.sigmoid(self.beta(g))[..., None, None]  # eq. 9
        decay = torch.exp(-self.log_rate.exp() * F.softplus(self.decay(g) + self.dt_bias))[..., None, None]
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


# ---- the same, fast ----

class Sizes(NamedTuple):
    """What the scan must know of a Config, as numbers."""
    n_embd: int
    n_ffn: int
    n_head: int
    d_k: int
    d_v: int
    n_layer: int

    @classmethod
    def of(cls, config):
        return cls(*(getattr(config, name) for name in cls._fields))

    def columns(self, layer):
        """Widths of a layer's product in: gate | query, key | value | beta | decay | silu'd: feed-forward, read gate | up."""
        writes = layer == 0
        return [self.n_embd, self.n_head * self.d_k * (1 + writes), self.n_head * self.d_v * writes, self.n_head * writes,
                self.n_head * writes, self.n_ffn + self.n_head * self.d_v, self.n_ffn]

    @property
    def width(self):
        """Numbers in the products of a token: the ground gate's, then each layer's and the memory's answer to it."""
        return self.n_embd + sum(sum(self.columns(i)) + self.n_head * self.d_v for i in range(self.n_layer))


class Weights:
    """`Model._folded` as products in one dtype. backward: the products of a gradient with the weights instead."""

    def __init__(self, folded, sizes, eps, dtype, backward=False):
        ground, bias, *rest = folded
        ready = lambda w: packed(w.T.to(dtype) if backward else w.to(dtype))
        self.sizes, self.ground, self.layers = sizes, (ready(ground), None if backward else bias.to(dtype)), []
        for enter, b, leave in zip(*(rest[i:3 * sizes.n_layer:3] for i in range(3))):
            self.layers.append((ready(enter), None if backward else b.to(dtype), ready(leave)))
        wide = dict(device=ground.device, dtype=torch.promote_types(ground.dtype, torch.float32))
        self.rate, self.first_key = (x.to(**wide) for x in rest[-2:]) if sizes.n_head else [torch.zeros(0, sizes.d_k, **wide)] * 2
        self.state_eps = torch.tensor((sizes.n_embd * eps) ** 0.5, **wide)
        self.answer_eps = torch.tensor((sizes.n_head * sizes.d_v * eps) ** 0.5, **wide)
        self.key_eps = torch.tensor(1e-6, **wide)


def packed(weight):
    """The weight in the layout of the CPU's matrix units, where this PyTorch can (private operators): products of few rows, which
    are bound by reading it, take half the time. Elsewhere the weight itself."""
    reorder = getattr(torch.ops.mkldnn, '_reorder_linear_weight', None)
    if weight.device.type == 'cpu' and weight.dtype != torch.float64 and reorder is not None and torch.backends.mkldnn.is_available():
        try:
            ready = reorder(weight.detach().contiguous())
            product(weight.new_zeros(1, weight.shape[1]), ready)
            return ready
        except RuntimeError:  # this dtype has no such operator here
            pass
    return weight


def product(x, weight, bias=None):
    """x W^T + b for rows x (B, ...), in the weight's dtype."""
    x = x.to(weight.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '') if weight.is_mkldnn else F.linear(x, weight, bias)


def unit(x, eps):
    """x / sqrt(|x|^2 + eps^2) over the last axis, and what it was divided by: the RMSNorm and the L2 norm, but for a constant."""
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), eps)
    return x / length, length


def unit_gradient(grad, y, inverse):
    """The gradient of y = `unit`(x) with respect to x; inverse is 1 / its length, and may be 0 where x was cut by a ReLU."""
    return torch.addcmul(grad, y, (y * grad).sum(-1, keepdim=True), value=-1).mul_(inverse)


def step(w, s, k, memory, u, keep=None, active=None):
    """`Model.step` on folded weights. The key is carried where the equations carry g: it is all of it that the next token needs.

    w a `Weights`; s, u (B, C); k (B, H, K), memory (B, H, K, D) written in place; keep (B, 1), 0 where a document starts; active
    (B, 1) bool, false in rows that stay as they are. Returns s, k, memory, the layers' states [L of (B, C)], and all products.
    """
    _, n_ffn, H, K, D, _ = w.sizes
    if keep is not None:
        keep = keep if active is None else torch.where(active, keep, 1.0)
        s = s * keep
        k = torch.where(keep.unsqueeze(-1) > 0, k, w.first_key)
    z = product(unit(s, w.state_eps)[0], *w.ground)
    x, next_k, states, products = torch.addcmul(u, torch.sigmoid(z.to(u.dtype)), s), k, [], [z]  # eq. 4
    for i, (enter, bias, leave) in enumerate(w.layers):
        z = product(unit(x, w.state_eps)[0], enter, bias)
        products.append(z)
        gate, qk, v, beta, decay, silu, up = z.to(u.dtype).split(w.sizes.columns(i), -1)
        y = F.silu(silu)
        y[:, :n_ffn] *= up
        if H:
            qk = unit(F.relu(qk.unflatten(-1, (-1, K))), w.key_eps)[0]  # eq. 8
            q = qk[:, :H]
            if i == 0:
                decay, beta = torch.exp(-w.rate * F.softplus(decay)), torch.sigmoid(beta)  # eq. 9
                if active is not None:
                    decay, beta = torch.where(active, decay, 1.0), beta * active
                memory, answer = delta_step(memory, k, v.unflatten(-1, (H, D)), decay, beta, q, keep)  # eq. 10
                next_k = qk[:, H:]
            else:
                answer = (q.unsqueeze(-2) @ memory).squeeze(-2)
            answer = answer.flatten(1)
            products.append(answer)
            y[:, n_ffn:] *= unit(answer, w.answer_eps)[0]  # eq. 11
        x = torch.addcmul(product(y, leave).to(u.dtype), torch.sigmoid(gate), x)  # eq. 7
        states.append(x)
    if active is not None:
        x, next_k = torch.where(active, x, s), torch.where(active.unsqueeze(-1), next_k, k)
    return x, next_k, memory, states, products


def segments(T, segment_len, bptt_len):
    """[(first step, end)] of the pieces whose memories are recomputed at once; a gradient's cut is always between two."""
    starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len)})
    return list(zip(starts, [*starts[1:], T]))


def scan_forward(u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int], eps: float, dtype: torch.dtype,
                 segment_len: int, bptt_len: int, record: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """u (T, B, C), keep (T, B, 1) or None -> predicted states (T, B, C); and, if record, for the backward the states between layers
    (T, L - 1, B, C), all products (T, B, W) in dtype, and the memory at the start of each of `segments` (R, B, H, K, D)."""
    (T, B, C), sizes = u.shape, Sizes(*sizes)
    with torch.autocast(u.device.type, enabled=False):
        w = Weights(folded, sizes, eps, dtype)
        starts = [a for a, _ in segments(T, segment_len, bptt_len)] if record else []
        out, inner = torch.empty_like(u), u.new_empty(T if record else 0, sizes.n_layer - 1, B, C)
        kept = torch.empty(T if record else 0, B, sizes.width, device=u.device, dtype=dtype)
        memories = u.new_empty(len(starts), B, sizes.n_head, sizes.d_k, sizes.d_v)
        s, k, memory = u.new_zeros(B, C), w.first_key.expand(B, -1, -1), u.new_zeros(memories.shape[1:])
        for t in range(T):
            if t in starts:
                memories[starts.index(t)] = memory
            s, k, memory, states, products = step(w, s, k, memory, u[t], None if keep is None else keep[t])
            out[t] = s
            if record:
                torch.cat([x.to(dtype) for x in products], -1, out=kept[t])
                for i, x in enumerate(states[:-1]):
                    inner[t, i] = x
    return out, inner, kept, memories


def scan_backward(grad: torch.Tensor, u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], out: torch.Tensor,
                  inner: torch.Tensor, kept: torch.Tensor, memories: torch.Tensor, sizes: list[int], eps: float, dtype: torch.dtype,
                  segment_len: int, bptt_len: int) -> list[torch.Tensor]:
    """Gradients of u and of the folded weights from grad (T, B, C), that of the predicted states.

    Only the gradients of state, key and memory go through the steps; those of the weights are one large product each a segment.
    """
    (T, B, C), sizes = u.shape, Sizes(*sizes)
    with torch.autocast(u.device.type, enabled=False):
        w, grad_u = Weights(folded, sizes, eps, dtype, backward=True), torch.empty_like(u)
        grads = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        carried = u.new_zeros(B, C), u.new_zeros(B, sizes.n_head, sizes.d_k), u.new_zeros(memories.shape[1:])  # of s, k and M
        for (a, b), memory in reversed(list(zip(segments(T, segment_len, bptt_len), memories))):
            last = slice(a - 1, b - 1) if a else slice(0, b - 1)  # the steps before
            before = F.pad(out[last], (0, 0, 0, 0, b - a - len(out[last]), 0))
            here = None if keep is None else keep[a:b]
            segment = Segment(w, u[a:b], here, before, inner[a:b], kept[a:b], kept[last], memory)
            carried = segment.backward(w, grad[a:b], grad_u[a:b], carried, grads, cut_end=b < T and b % bptt_len == 0)
            if a and a % bptt_len == 0:
                for x in (carried[0], carried[2]):
                    x.zero_()  # the key's goes to its weights, in the step before, and no further
        if sizes.n_head:
            grads[-1] += carried[1].sum(0)
    return [grad_u, *(g.to(x.dtype) for g, x in zip(grads, folded))]


class Segment:
    """The gradient of some steps a .. b. Whatever is not recurrent is made first, for all of them at once: (S, B, ...) each."""

    def __init__(self, w, u, keep, before, inner, kept, last_kept, memory):
        """keep (S, B, 1) or None; before: the predicted states that the steps start from; inner, kept, memory as in `scan_forward`;
        last_kept: kept of the steps before, without the window's first."""
        _, n_ffn, H, K, D, L = w.sizes
        self.keep, kept = keep, kept.to(u.dtype)
        s = before if keep is None else before * keep
        z, kept = kept.split([w.sizes.n_embd, kept.shape[-1] - w.sizes.n_embd], -1)
        self.ground, self.layers = self._gate(w, s, z), []
        x = torch.addcmul(u, self.ground['gate'], s)
        for i in range(L):
            columns = w.sizes.columns(i)
            gate, qk, v, beta, decay, silu, up, answer, kept = kept.split([*columns, H * D, kept.shape[-1] - sum(columns) - H * D], -1)
            layer, sigmoid = self._gate(w, x, gate), torch.sigmoid(silu)
            if H:
                qk, length = unit(F.relu(qk.unflatten(-1, (-1, K))), w.key_eps)
                answer, answer_length = unit(answer, w.answer_eps)
                layer |= dict(qk=qk, qk_inverse=(qk > 0) / length, answer=answer, answer_inverse=1 / answer_length)
                up = torch.cat([up, answer], -1)
            if H and i == 0:
                self.softplus = F.softplus(decay)
                layer |= dict(v=v.unflatten(-1, (H, D)).contiguous(), beta=torch.sigmoid(beta), decay=torch.exp(-w.rate * self.softplus))
                layer |= dict(beta_slope=layer['beta'] * (1 - layer['beta']), decay_slope=-w.rate * torch.sigmoid(decay))
                layer['k'] = self._keys(w, last_kept.to(u.dtype))
                self.memories = delta_replay(memory, *(layer[name] for name in ('k', 'v', 'decay', 'beta')), keep)
            layer['y'] = silu * sigmoid * up
            layer['slopes'] = torch.stack([up * sigmoid * (1 + silu * (1 - sigmoid)), silu * sigmoid], -2)  # of what is silu'd, of up
            self.layers.append(layer)
            x = inner[:, i] if i < L - 1 else None

    @staticmethod
    def _gate(w, x, z):
        (n, length), gate = unit(x, w.state_eps), torch.sigmoid(z)
        return dict(n=n, inverse=1 / length, gate=gate, gate_slope=x * gate * (1 - gate))

    def _keys(self, w, last_kept):
        """The keys (S, B, H, K) that the steps write by: each from the step before, or from a zero state."""
        _, _, H, K, _, _ = w.sizes
        start = 2 * w.sizes.n_embd + H * K
        k = unit(F.relu(last_kept[..., start:start + H * K].unflatten(-1, (H, K))), w.key_eps)[0]
        if len(k) < len(self.ground['n']):
            k = torch.cat([w.first_key.expand(1, k.shape[1], -1, -1), k])
        return k if self.keep is None else torch.where(self.keep.unsqueeze(-1) > 0, k, w.first_key)

    def backward(self, w, grad, grad_u, carried, grads, cut_end):
        """Takes carried = the gradients of s, k and M after the segment to those before it. Writes grad_u, adds to grads, those of
        the weights. cut_end: what came after is another piece of truncated BPTT, so that the last key's gradient reaches weights only."""
        (S, B, C), (_, n_ffn, H, K, D, L) = grad.shape, w.sizes
        ds, dk, dm = carried
        dz, dx = [], [torch.empty_like(grad) for _ in range(L)] + [grad_u]
        for i in range(L):
            columns = w.sizes.columns(i)
            z = grad.new_empty(S, B, sum(columns) + H * D)  # as a product in, then the answer
            gate, qk, v, beta, decay, pair = z.split([*columns[:5], 2 * columns[5]], -1)
            dz.append(dict(z=z, into=z[..., :sum(columns)], gate=gate, qk=qk.unflatten(-1, (-1, K)), v=v,
                           beta=beta, decay=decay, pair=pair.unflatten(-1, (2, -1))))
        df, dlog = torch.empty_like(grad), grad.new_empty(S, B, H)
        at = lambda j, parts: {name: x[j] for name, x in parts.items()}
        for j in reversed(range(S)):
            torch.add(ds, grad[j], out=dx[L - 1][j])
            for i in reversed(range(L)):
                enter, _, leave = w.layers[i]
                here, out, d = at(j, self.layers[i]), at(j, dz[i]), dx[i][j]
                torch.mul(product(d, leave).to(d.dtype).unsqueeze(1), here['slopes'], out=out['pair'])
                torch.mul(d, here['gate_slope'], out=out['gate'])
                if H:
                    danswer = unit_gradient(out['pair'][:, 1, n_ffn:], here['answer'], here['answer_inverse']).unflatten(-1, (H, D))
                    q = here['qk'][:, :H]
                    if i == 0:
                        dq, dk_before, dv, dbeta, dlog[j] = delta_step_backward(
                            dm, self.memories[j], here['k'], here['v'], here['decay'], here['beta'], q, danswer, None if self.keep is None else self.keep[j])
                        out['v'].copy_(dv.flatten(1))
                        torch.mul(dbeta, here['beta_slope'], out=out['beta'])
                        torch.mul(dlog[j], here['decay_slope'], out=out['decay'])
                        dq, dk = torch.cat([dq, dk], 1), dk_before
                    else:
                        dq = (danswer.unsqueeze(-2) @ self.memories[j + 1].transpose(-1, -2)).squeeze(-2)
                        dm.addcmul_(q.unsqueeze(-1), danswer.unsqueeze(-2))
                    out['qk'].copy_(unit_gradient(dq, here['qk'], here['qk_inverse']))
                z = out['into']
                if cut_end and i == 0 and j == S - 1:
                    z = z.clone()
                    z[:, C + H * K:C + 2 * H * K] = 0
                dn = unit_gradient(product(z, enter).to(d.dtype), here['n'], here['inverse'])
                torch.addcmul(dn, d, here['gate'], out=dx[i - 1][j])  # dx[-1] is grad_u
            torch.mul(grad_u[j], self.ground['gate_slope'][j], out=df[j])
            dn = unit_gradient(product(df[j], w.ground[0]).to(df.dtype), self.ground['n'][j], self.ground['inverse'][j])
            ds = dn.addcmul_(grad_u[j], self.ground['gate'][j])
            if self.keep is not None:
                ds.mul_(self.keep[j])
                if H:
                    goes_on = self.keep[j].unsqueeze(-1)
                    grads[-1] += (dk * (1 - goes_on)).sum(0)
                    dk = dk * goes_on
        self._weight_gradients(w, df, dz, dx, dlog, grads)
        return ds, dk, dm

    def _weight_gradients(self, w, df, dz, dx, dlog, grads):
        dtype = w.ground[0].dtype

        def add(grad, dout, x):
            dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
            grad.addmm_(dout.T, x) if dtype == grad.dtype else grad.add_(dout.T @ x)

        add(grads[0], df, self.ground['n'])
        grads[1] += df.sum((0, 1))
        for i, (z, layer) in enumerate(zip(dz, self.layers)):
            enter, bias, leave = grads[2 + 3 * i:5 + 3 * i]
            add(enter, z['into'], layer['n'])
            bias += z['into'].sum((0, 1))
            add(leave, dx[i], layer['y'])
        if w.sizes.n_head:
            grads[-2] -= (dlog * self.softplus).sum((0, 1))


_scan_op = torch.library.custom_op('gpn::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op('gpn::scan_backward', scan_backward, mutates_args=())


@_scan_op.register_fake
def _(u, keep, folded, sizes, eps, dtype, segment_len, bptt_len, record):
    (T, B, C), sizes = u.shape, Sizes(*sizes)
    steps, memory = (T, len(segments(T, segment_len, bptt_len))) if record else (0, 0), (sizes.n_head, sizes.d_k, sizes.d_v)
    return (torch.empty_like(u), u.new_empty(steps[0], sizes.n_layer - 1, B, C), u.new_empty(steps[0], B, sizes.width, dtype=dtype),
            u.new_empty(steps[1], B, *memory))


@_scan_backward_op.register_fake
def _(grad, u, keep, folded, *args):
    return [torch.empty_like(x) for x in (u, *folded)]


def _save_for_backward(ctx, inputs, output):
    u, keep, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, keep, *output, *folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grad, *_):
    u, keep, out, inner, kept, memories, *folded = ctx.saved_tensors
    grad_u, *grads = _scan_backward_op(grad.contiguous(), u, keep, folded, out, inner, kept, memories, *ctx.numbers)
    return grad_u, None, grads, *[None] * 6


_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def scan(u, keep, folded, sizes, eps, dtype, segment_len, bptt_len):
    """`step` over a window: u (T, B, C), keep (T, B, 1) or None, folded from `Model._folded` -> predicted states (T, B, C).

    One operator to PyTorch, so that a compiler meets no loop. Products in dtype; state and memory in u's."""
    return _scan_op(u, keep, folded, list(sizes), eps, dtype, segment_len, bptt_len, torch.is_grad_enabled())[0]


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

    def step(self, u, s, g, memory):
        """One token: u (B, C) from `_fused`; s, g, memory of the token before, zeros at first, memory None without -> s, g, memory."""
        last, g = g, torch.sigmoid(self.ground_gate(self.ground_norm(s))) * s + u  # eq. 4
        if memory is not None:
            memory = self.write(last, g, memory)
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
        return self.decode(self.norm(s))

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
        (B, n), rows = tokens.shape, torch.arange(len(tokens), device=tokens.device)[:, None]
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        u = self._fused(tokens).to(cache.s.dtype)
        keep = torch.ones_like(u[..., :1])
        if self.config.eos_id is not None:
            ends = tokens == self.config.eos_id
            keep = 1 - torch.cat([cache.ended[:, None], ends[:, :-1]], 1).to(u.dtype).unsqueeze(-1)
            cache.ended.copy_(ends[rows[:, 0], run - 1])
        positions, m = torch.arange(n, device=tokens.device), min(n, cache.max_run)
        first = (run - cache.max_run).clamp(min=0)  # the tokens before it cannot be rolled back
        early = [cache.advance(u[:, t], keep[:, t], positions[t] < first) for t in range(n - cache.max_run)]
        cache.snapshot(run - first)
        last = first[:, None] + positions[:m]
        cache.u[:, :m], cache.keep[:, :m] = u[rows, last.clamp(max=n - 1)], keep[rows, last.clamp(max=n - 1)]
        late = [cache.advance(cache.u[:, t], cache.keep[:, t], positions[t] < run - first) for t in range(m)]
        h_last = self._decoded(torch.stack(late, 1).to(self.norm.weight.dtype))
        cache.lengths += run
        cache.hidden[:, :m] = h_last
        if not all_positions:
            return self._logits(h_last[rows[:, 0], run - first - 1])
        h = h_last
        if early:
            h = self._decoded(torch.stack(early + late, 1).to(self.norm.weight.dtype))
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
        with torch.no_grad():
            self.weights = Weights([w.to(device) for w in model._folded()], Sizes.of(c), c.norm_eps, model.fuse.weight.dtype)
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
        return sum(x.nbytes for x in (self.s, self.k, self.memory, self.ended, *self.before, self.u, self.keep, self.since, self.lengths, self.hidden))

    def advance(self, u, keep, active):
        """One token in the rows that are active (B,): u (B, C), keep (B, 1). Returns the new states (B, C)."""
        s, k, self.memory, *_ = step(self.weights, self.s, self.k, self.memory, u, keep, active[:, None])
        self.s.copy_(s)
        self.k.copy_(k)
        return s

    def snapshot(self, since):
        for x, now in zip(self.before, (self.s, self.k, self.memory)):
            x.copy_(now)
        self.since.copy_(since)

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
        for t in range(longest):
            self.advance(self.u[:, t], self.keep[:, t], back & (t < self.since))
