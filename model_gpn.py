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
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (GPNInC, delta_replay, delta_step, delta_step_backward, gate, gate_gradient, glu, glu_gradient, heads, heads_gradient,
                          linear_cross_entropy, rms_norm, rows_times, unit)


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
        """Widths of a layer's product in: gate | query and, where it writes, key, value, beta, decay | silu'd: feed-forward, read gate; up."""
        writes = self.n_head * (self.d_k + self.d_v + 2) if layer == 0 else 0
        return [self.n_embd, self.n_head * self.d_k + writes, 2 * self.n_ffn + self.n_head * self.d_v]

    def kept(self):
        """Widths of what the backward needs of a step's products: the ground's, each layer's product in and, with a memory, its answer."""
        answer = [self.n_head * self.d_v] * (self.n_head > 0)
        return [self.n_embd, *(width for i in range(self.n_layer) for width in (sum(self.columns(i)), *answer))]


class Weights:
    """`Model._folded` as products in one dtype. backward: the products of a gradient with the weights instead."""

    graphs = False  # CUDA graphs read these tensors

    def __init__(self, folded, sizes, eps, dtype, backward=False):
        device, wide = folded[0].device, torch.promote_types(folded[0].dtype, torch.float32)
        no_memory = [torch.zeros(0, sizes.d_k, device=device)] * 2
        self.rate, self.first_key = (x.detach().to(wide) for x in (folded[-2:] if sizes.n_head else no_memory))
        self.state_eps, self.answer_eps, self.key_eps = (sizes.n_embd * eps) ** 0.5, (sizes.n_head * sizes.d_v * eps) ** 0.5, 1e-6
        products = [w.detach().to(dtype) for w in folded[:2 + 3 * sizes.n_layer]]
        if backward:
            products = [w.T if w.dim() == 2 else None for w in products]
        self.sizes, self.dtype, self.in_c = sizes, dtype, None
        if dtype == wide and GPNInC.serves(device, dtype):
            self.in_c = GPNInC(products, self.rate, self.first_key, sizes, (self.state_eps, self.answer_eps, self.key_eps))
            return
        products = [w if w is None or w.dim() == 1 else packed(w) for w in products]
        self.ground, self.layers = products[:2], [products[i:i + 3] for i in range(2, len(products), 3)]

    def tensors(self):
        return [x for x in (*self.ground, *(x for layer in self.layers for x in layer), self.rate, self.first_key) if x is not None]


def packed(weight):
    """The weight in the layout of the CPU's matrix units, where this PyTorch can (private operators): products of few rows are bound
    by reading it, and take half the time. Elsewhere the weight itself."""
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


def step(w, s, direction, k, memory, u, keep=None, active=None):
    """`Model.step` on folded weights. The key is carried where the equations carry g: it is all of it that the next token needs.

    w a `Weights`; s, u (B, C); direction `unit`(s) (B, C); k (B, H, K), memory (B, H, K, D) written in place; keep (B, 1), 0 where a
    document starts; active (B, 1) bool, false in rows that stay as they are. Returns s, direction, k and, for the backward, each
    layer's state and all products.
    """
    H, K, dtype = w.sizes.n_head, w.sizes.d_k, direction.dtype
    if keep is not None:
        keep = keep if active is None else torch.where(active, keep, 1.0)
        s, direction = s * keep, direction * keep.to(dtype)
        k = torch.where(keep.unsqueeze(-1) > 0, k, w.first_key)
    z = product(direction, *w.ground)
    x, direction = gate(z, s, u, w.state_eps, dtype)  # eq. 4
    next_k, states, products, answer = k, [], [z], None
    for i, (enter, bias, leave) in enumerate(w.layers):
        z = product(direction, enter, bias)
        products.append(z)
        gate_in, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        if H:
            q, new_k, v, decay, beta = heads(memory_in, None if i else w.rate, H, K, w.key_eps)  # eq. 8, 9
            if i == 0:
                if active is not None:
                    decay, beta = torch.where(active, decay, 1.0), beta * active
                next_k, answer = new_k, delta_step(memory, k, v, decay, beta, q, keep)  # eq. 10
            else:
                answer = rows_times(q, memory)
            answer = answer.flatten(1)
            products.append(answer)
        y = glu(glu_in, answer, w.answer_eps, dtype)
        x, direction = gate(gate_in, x, product(y, leave), w.state_eps, dtype)  # eq. 7, 11
        states.append(x)
    if active is not None:
        x, next_k = torch.where(active, x, s), torch.where(active.unsqueeze(-1), next_k, k)
    return x, direction, next_k, states, products


def steps(w, s, k, memory, u, keep=None, active=None):
    """`step` for each of u (n, B, C), keep and active (n, B, 1). Returns s, k, memory and, (n, B, ...) each, the layers' states and the
    products."""
    if w.in_c:
        return w.in_c.steps(s, k, memory, u, keep, active)
    rows, direction, at = [], unit(s, w.state_eps)[0].to(w.dtype), lambda x, j: None if x is None else x[j]
    for j in range(len(u)):
        s, direction, k, states, products = step(w, s, direction, k, memory, u[j], at(keep, j), at(active, j))
        rows.append((*states, *products))
    return s, k, memory, [torch.stack(row) if len(u) > 1 else row[0].unsqueeze(0) for row in zip(*rows)]  # decoding copies nothing


def segment_gradient(w, cut_end, u, keep, s, k, memory, grad, ds, dk, dm, *kept):
    """The gradient of the steps of a segment, `steps` backwards.

    s (S, B, C), the predicted states that the steps start from; k (B, H, K), memory: before the first; grad (S, B, C), of the
    predicted states; ds, dk, dm: of the last state, of the next key and of the memory, from what comes after; cut_end: that is
    another piece of truncated BPTT, and dk then reaches the weights only; kept: what `steps` gave, (S, B, ...) each, the states of
    all layers but the last, then the products.
    Returns the gradient of u (S, B, C), the new ds, dk, dm, those of the rates and of the first key, and for each weight of a
    product a pair: its gradient is the product of the two over all steps.
    """
    if w.in_c:
        return w.in_c.gradient(cut_end, u, keep, s, k, memory, grad, ds, dk, dm, *kept)
    (S, B, C), (_, n_ffn, H, K, D, L) = grad.shape, w.sizes
    inner, z0, kept = kept[:L - 1], kept[L - 1], kept[L:]

    def gated(x, z):
        (direction, length), gate = unit(x, w.state_eps), torch.sigmoid(z[..., :C].to(x.dtype))
        return dict(direction=direction, inverse=1 / length, gate=gate, slope=x * gate * (1 - gate), dz=torch.empty_like(z))

    # what is not recurrent, for all steps at once
    s = s if keep is None else s * keep
    ground, layers = gated(s, z0), []
    for i, x in enumerate([torch.addcmul(u, ground['gate'], s), *inner]):
        z = kept[i * (1 + (H > 0))]
        _, memory_in, glu_in = z.split(w.sizes.columns(i), -1)
        layer = gated(x, z) | dict(memory_in=memory_in, glu_in=glu_in, y=u.new_empty(S, B, n_ffn + H * D, dtype=w.dtype))
        layer |= dict(zip(('d_gate_in', 'd_memory_in', 'd_glu_in'), layer['dz'].split(w.sizes.columns(i), -1)))
        if H:
            of_all_steps = heads(memory_in.flatten(0, 1), None if i else w.rate, H, K, w.key_eps)
            q, next_k, v, decay, beta = (x if x is None else x.unflatten(0, (S, B)) for x in of_all_steps)
            layer |= dict(q=q, answer=kept[2 * i + 1])
        if H and i == 0:
            k = torch.cat([k.unsqueeze(0), next_k[:-1]])
            k = k if keep is None else torch.where(keep.unsqueeze(-1) > 0, k, w.first_key)
            layer |= dict(k=k, v=v, decay=decay, beta=beta)
            memories = delta_replay(memory, k, v, decay, beta, keep).unbind()
        layers.append(layer)

    # what is: the gradients of state, key and memory
    rows = lambda parts: [dict(zip(parts, row)) for row in zip(*(x.unbind() for x in parts.values()))]  # once: indexing is slow
    at_ground, at_layers = rows(ground | dict(grad=grad)), [rows(layer) for layer in layers]
    dx, du, drate, first_key = [[] for _ in range(L)], [], u.new_zeros(B, H), u.new_zeros(B, H, K)
    for j in reversed(range(S)):
        at = at_ground[j]
        d = ds + at['grad']
        for i in reversed(range(L)):
            here, (enter, _, leave) = at_layers[i][j], w.layers[i]
            dx[i].append(d)
            torch.mul(d, here['slope'], out=here['d_gate_in'])
            answer = glu_gradient(product(d, leave), here['glu_in'], here.get('answer'), w.answer_eps, here['d_glu_in'], here['y'])
            z, answer = here['dz'], answer.view(B, H, D) if H else None
            if H and i == 0:
                dq, dk_before, dv, dbeta, dlog = delta_step_backward(dm, memories[j], here['k'], here['v'], here['decay'], here['beta'], here['q'],
                                                                     answer, None if keep is None else keep[j])
                drate += heads_gradient(here['memory_in'], w.rate, w.key_eps, here['d_memory_in'], dq, dk, dv, dbeta, dlog)
                dk = dk_before
                if cut_end and j == S - 1:
                    z = z.clone()
                    z[:, C + H * K:C + 2 * H * K] = 0
            elif H:
                dq = rows_times(answer, memories[j + 1].transpose(-1, -2))
                dm.addcmul_(here['q'].unsqueeze(-1), answer.unsqueeze(-2))
                heads_gradient(here['memory_in'], None, w.key_eps, here['d_memory_in'], dq)
            d = gate_gradient(product(z, enter), here['direction'], here['inverse'], d, here['gate'])
        du.append(d)
        torch.mul(d, at['slope'], out=at['dz'])
        ds = gate_gradient(product(at['dz'], w.ground[0]), at['direction'], at['inverse'], d, at['gate'])
        if keep is not None:
            goes_on = keep[j].unsqueeze(-1)
            ds, first_key, dk = ds * keep[j], first_key + dk * (1 - goes_on), dk * goes_on
    stack = lambda rows: torch.stack(rows[::-1])
    pairs = [(ground['dz'], ground['direction'])]
    for i, layer in enumerate(layers):
        pairs += [(layer['dz'], layer['direction']), (stack(dx[i]), layer['y'])]
    return stack(du), ds, dk, dm, drate.sum(0), first_key.sum(0), pairs


class Graph:
    """A function of tensors, or None, as a CUDA graph. Its results are overwritten by the next replay."""

    def __init__(self, function, inputs):
        self.inputs = [x if x is None else x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what happens only once, as compiling kernels
            function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):  # nccl's own thread may go on
            self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(self.inputs, inputs):
            if own is not None:
                own.copy_(x)
        self.graph.replay()
        return self.results


GRAPHS = True  # in training on a GPU a segment is one CUDA graph, as its kernels are too small for their launches
_graphs, _graph_weights = {}, {}  # made once for each shape, and kept


def uses_graphs(x):
    return GRAPHS and x.is_cuda


def segment_weights(folded, *options):
    """`Weights`, for `run_segment`: with graphs always the same tensors with new values, as graphs read the ones they were made with."""
    w = Weights(folded, *options)
    if not uses_graphs(folded[0]):
        return w
    key = (*options, folded[0].device, folded[0].shape, folded[0].dtype)
    if key not in _graph_weights:
        _graph_weights[key] = Weights([x.clone() for x in folded], *options)
        _graph_weights[key].graphs = True
    for own, x in zip(_graph_weights[key].tensors(), w.tensors()):
        own.copy_(x)
    return _graph_weights[key]


def run_segment(function, w, inputs, *options):
    """function(w, *options, *inputs), the inputs tensors or None; with graphs, results that the next call overwrites."""
    if not w.graphs:
        return function(w, *options, *inputs)
    key = (function, w, *options, *(x if x is None else (x.shape, x.dtype) for x in inputs))
    if key not in _graphs:
        _graphs[key] = Graph(functools.partial(function, w, *options), inputs)
    return _graphs[key].replay(inputs)


def segments(T, segment_len, bptt_len):
    """[(first step, end)] of the pieces whose memories are recomputed at once; a gradient's cut is always between two."""
    starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len)})
    return list(zip(starts, [*starts[1:], T]))


def scan_forward(u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int], eps: float, dtype: torch.dtype,
                 segment_len: int, bptt_len: int, record: bool) -> list[torch.Tensor]:
    """u (T, B, C), keep (T, B, 1) or None -> predicted states (T, B, C); then, if record, what the backward needs: the memory at the
    start of each of `segments` (R, B, H, K, D), the states between layers (T, B, C) and the products (T, B, width) in dtype."""
    T, sizes, n = len(u), Sizes(*sizes), sizes[-1]
    with torch.autocast(u.device.type, enabled=False):
        w = (segment_weights if record else Weights)(folded, sizes, eps, dtype)
        outputs = _scan_outputs(u, Sizes(*sizes), dtype, segment_len, bptt_len, record)
        out, memories, *kept = outputs
        s, k, memory = torch.zeros_like(u[0]), w.first_key.repeat(u.shape[1], 1, 1), torch.zeros_like(memories[0])
        for r, (a, b) in enumerate(segments(T, segment_len, bptt_len)):
            if record:
                memories[r] = memory
            s, k, memory, rows = run_segment(steps, w, [s, k, memory, u[a:b], None if keep is None else keep[a:b]])
            out[a:b] = rows[n - 1]
            for x, row in zip(kept, (*rows[:n - 1], *rows[n:])):  # none without record
                x[a:b] = row
    return outputs


def _scan_outputs(u, sizes, dtype, segment_len, bptt_len, record):
    """Empty tensors for what `scan_forward` returns."""
    (T, B, _), H = u.shape, sizes.n_head
    if not record:
        return [torch.empty_like(u), u.new_empty(1, B, H, sizes.d_k, sizes.d_v)]
    return [torch.empty_like(u), u.new_empty(len(segments(T, segment_len, bptt_len)), B, H, sizes.d_k, sizes.d_v),
            *(torch.empty_like(u) for _ in range(sizes.n_layer - 1)), *(u.new_empty(T, B, width, dtype=dtype) for width in sizes.kept())]


def scan_backward(grad: torch.Tensor, u: torch.Tensor, keep: torch.Tensor | None, folded: list[torch.Tensor], outputs: list[torch.Tensor],
                  sizes: list[int], eps: float, dtype: torch.dtype, segment_len: int, bptt_len: int) -> list[torch.Tensor]:
    """Gradients of u and of the folded weights from grad (T, B, C), that of the predicted states.

    Only the gradients of state, key and memory go through the steps; those of the weights are one large product each a segment.
    """
    (T, B, C), sizes, (out, memories, *kept) = u.shape, Sizes(*sizes), outputs
    L, H, K = sizes.n_layer, sizes.n_head, sizes.d_k

    def add(grad, dout, x):
        dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
        grad.addmm_(dout.T, x) if dtype == grad.dtype else grad.add_(dout.T @ x)

    with torch.autocast(u.device.type, enabled=False):
        w, grad_u = segment_weights(folded, sizes, eps, dtype, True), torch.empty_like(u)
        grads = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        ds, dk, dm = u.new_zeros(B, C), u.new_zeros(B, H, K), torch.zeros_like(memories[0])
        for (a, b), memory in reversed(list(zip(segments(T, segment_len, bptt_len), memories))):
            s = out[a - 1:b - 1] if a else F.pad(out[:b - 1], (0, 0, 0, 0, 1, 0))
            k = w.first_key.repeat(B, 1, 1)
            if a and H:
                k = unit(F.relu(kept[L][a - 1, :, C + H * K:C + 2 * H * K].to(u.dtype).unflatten(-1, (H, K))), w.key_eps)[0]
            inputs = [u[a:b], None if keep is None else keep[a:b], s, k, memory, grad[a:b], ds, dk, dm, *(x[a:b] for x in kept)]
            grad_u[a:b], ds, dk, dm, rate, first_key, pairs = run_segment(segment_gradient, w, inputs, b < T and b % bptt_len == 0)
            add(grads[0], *pairs[0])
            grads[1] += pairs[0][0].sum((0, 1))
            for i in range(L):
                (dz, n), (dx, y) = pairs[1 + 2 * i:3 + 2 * i]
                add(grads[2 + 3 * i], dz, n)
                grads[3 + 3 * i] += dz.sum((0, 1))
                add(grads[4 + 3 * i], dx, y)
            if H:
                grads[-2] += rate
                grads[-1] += first_key if a else first_key + dk.sum(0)
            if a % bptt_len == 0:
                ds, dm = torch.zeros_like(ds), torch.zeros_like(dm)  # the key's goes to its weights, in the step before, and no further
    return [grad_u, *(g.to(x.dtype) for g, x in zip(grads, folded))]


_scan_op = torch.library.custom_op('gpn::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op('gpn::scan_backward', scan_backward, mutates_args=())
_scan_op.register_fake(lambda u, keep, folded, sizes, eps, dtype, segment_len, bptt_len, record:
                       _scan_outputs(u, Sizes(*sizes), dtype, segment_len, bptt_len, record))
_scan_backward_op.register_fake(lambda grad, u, keep, folded, *_: [torch.empty_like(x) for x in (u, *folded)])


def _save_for_backward(ctx, inputs, output):
    u, keep, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, keep, *folded, *output)
    ctx.n_folded = len(folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grads):
    u, keep, *saved = ctx.saved_tensors
    folded, outputs = saved[:ctx.n_folded], saved[ctx.n_folded:]
    grad_u, *grad_folded = _scan_backward_op(grads[0].contiguous(), u, keep, folded, outputs, *ctx.numbers)
    return grad_u, None, grad_folded, *[None] * 6


_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def scan(u, keep, folded, sizes, eps, dtype, segment_len, bptt_len):
    """`step` over a window: u (T, B, C), keep (T, B, 1) or None, folded from `Model._folded` -> predicted states (T, B, C).

    Products in dtype; state and memory in u's. One operator to PyTorch, so that a compiler meets no loop."""
    return _scan_op(u.contiguous(), keep, folded, list(sizes), eps, dtype, segment_len, bptt_len, torch.is_grad_enabled())[0]


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
