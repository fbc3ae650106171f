"""A fast `Model.loop` for model_context_ready: Algorithm 1 with a hand-written, exact gradient.

    forward                                backward

    t = 0 ... T-1                          t = T-1 ... 0
      correction from z[t-1] and e[t]        g = gradient of z[t], from loss and position t + 1
      each layer: x = x + branch(x)          each layer in reverse: g = g + branch's input gradient
      z[t] = x                               the correction: gradients of z[t-1] and e[t]

One position is many tiny operators, so speed depends on their number. Each residual branch has a
tape. In the forward pass, the tape records the branch's values at each position: the inputs of its
norm and GELU, queries, keys, values, probabilities. The backward pass reads them in reverse and
records the gradient of each product's output. Only the state's gradient is computed position by
position; each weight's gradient is one large product over all positions at the end.

    step(t, x)           run the branch at position t: (B, C); record intermediate values
    start_back()         compute what the backward pass can do for all positions at once
    back(t, grad)        return the input gradient at t for an output gradient; record gradients
    weight_gradients()   return [(parameter, gradient)]

    T positions, B batch size, C width, H heads, D head size, W keys that a query may see
"""
import math
import sys
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

PINS = {'7a94a003ba996ef3'}  # digests of what `implements` lists
SMALL = dict(n_layer=2, n_head=2, n_embd=24, vocab_size=64, n_ids=60, bptt=True, segment_len=5, eos_id=59,
             window=4)  # for tests


def implements(model_file):
    """Return the code that this file re-implements, so that edits to it are detected."""
    m, k = model_file, sys.modules[model_file.attention.__module__]  # attn_kernels, or a copy
    bias = [m.Model.score_bias] if hasattr(m.Model, 'score_bias') else []  # not implemented here
    return [*bias, m.FFN, m.Block, m.Model.__init__, m.Model.sees, m.Model.correct, m.Model.step, m.Model.loop,
            k.rotate, k.attention, k._dense_sdpa]


def stream(model, idx, graphs=True):
    """Run Algorithm 1, differentiable, in the weights' dtype. idx: (B, T) -> z (B, T, C).

    graphs: when training on a GPU, replay forward and backward as CUDA graphs. A backward pass must
    then run before the next forward.
    """
    c = model.config
    e, doc_start, _, rope = model.prepare(idx)
    B, T, C = e.shape
    dropout = None  # factors for the blocks' input, then for the two branches of each block
    if c.dropout and model.training:
        dropout = F.dropout(e.new_ones(1 + 2 * c.n_layer, T, B, C), c.dropout)
    params = _parameters(model)
    # A graph needs weights at fixed addresses, unlike functional_call's, or FSDP's, which are
    # gathered anew for each step.
    fixed = all(isinstance(p, nn.Parameter) for p in params) and not hasattr(model, 'set_requires_gradient_sync')
    use_graphs = graphs and e.is_cuda and torch.is_grad_enabled() and fixed
    inputs = e, *rope, doc_start, dropout
    return _run_graphed(model, inputs, params) if use_graphs else Scan.apply(model, *inputs, *params)


def _parameters(model):
    """Return the parameters that `Scan` computes gradients for."""
    return list(dict.fromkeys([*model.blocks.parameters(), *model.correction.parameters()]))  # `tied` shares some


def _run_graphed(model, inputs, params):
    """Run `Scan` with CUDA graphs, captured once per input shape and set of weight addresses."""
    graphs = vars(model).setdefault('scan_graphs', {})
    is_given = [x is not None for x in inputs]
    given = [x for x in inputs if x is not None]  # a graph's inputs must be tensors

    def scan(*tensors):
        rest = iter(tensors)
        return Scan.apply(model, *(next(rest) if there else None for there in is_given), *rest)

    key = inputs[0].shape, model.reach, *is_given, *(p.data_ptr() for p in params)
    if key not in graphs:
        e, *others = given
        e, *own = (x.detach().clone().requires_grad_() for x in (e, *params))
        with warnings.catch_warnings():  # PyTorch warms up on one stream and captures on another
            warnings.filterwarnings('ignore', 'The AccumulateGrad node')
            graphs[key] = torch.cuda.make_graphed_callables(scan, (e, *others, *own))
    # `p * 1`: p.grad gets a copy of the graph's gradients, which the next replay overwrites
    return graphs[key](*given, *(p * 1 for p in params))


class Scan(torch.autograd.Function):
    """Algorithm 1 on embeddings e (B, T, C). dropout: factors (1 + 2 n_layer, T, B, C) or None."""

    @staticmethod
    def forward(ctx, model, e, cos, sin, doc_start, dropout, *params):
        T = e.shape[1]
        e = e.transpose(0, 1).contiguous()  # positions first, so that each is contiguous
        correct = _CorrectionTape(model, e, doc_start)
        branches = []
        for block in model.blocks:
            branches += [_AttentionTape(block, e, (cos, sin), doc_start, model.reach), _FFNTape(block.ffn, e)]
        z = torch.empty_like(e)
        for t in range(T):
            x = e[t] + correct.step(t, z[t - 1] if t else torch.zeros_like(e[0]))
            if dropout is not None:
                x *= dropout[0, t]
            for i, tape in enumerate(branches):
                y = tape.step(t, x)
                x = x + y if dropout is None else torch.addcmul(x, y, dropout[1 + i, t])
            z[t] = x
        ctx.save_for_backward(*params)  # raises an error if weights change before the backward
        # tapes name gradients by the model's parameters; params may be copies (`_run_graphed`)
        ctx.tapes, ctx.dropout, ctx.params = (correct, branches), dropout, _parameters(model)
        return z.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        _, (correct, branches), dropout = ctx.saved_tensors, ctx.tapes, ctx.dropout
        ctx.tapes = None  # free memory even if the loss is kept
        grad = grad.transpose(0, 1).contiguous()
        grad_e, through_z, grads = torch.empty_like(grad), torch.zeros_like(grad[0]), {}
        with torch.autocast(grad.device.type, enabled=False):
            for tape in (correct, *branches):
                tape.start_back()
            for t in reversed(range(len(grad))):
                g = grad[t] + through_z  # gradient of z[t], which position t + 1 reads
                for i, tape in reversed(list(enumerate(branches))):
                    g = g + tape.back(t, g if dropout is None else g * dropout[1 + i, t])
                if dropout is not None:
                    g = g * dropout[0, t]
                through_z, through_e = correct.back(t, g)
                grad_e[t] = g if through_e is None else g + through_e
            for tape in (correct, *branches):
                for p, g in tape.weight_gradients():
                    grads[p] = grads[p] + g if p in grads else g  # `tied` uses some weights twice
        return None, grad_e.transpose(0, 1), *[None] * 4, *(grads[p] for p in ctx.params)


class _NormTape:
    """LayerNorm before a linear layer. x: (T, B, n), room for its inputs."""

    def __init__(self, norm, x):
        self.norm, self.x = norm, x

    def step(self, t, x):
        self.x[t] = x
        return F.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias, self.norm.eps)

    def start_back(self):
        n = self.norm
        self.y, self.mean, self.rstd = torch.native_layer_norm(self.x, n.normalized_shape, n.weight, n.bias, n.eps)
        self.grad = torch.empty_like(self.x)

    def back(self, t, weight, grad):
        """Return the gradient of x[t], given the next layer's weight and output gradient."""
        torch.mm(grad, weight, out=self.grad[t])
        return self._input_gradient(t)

    def _input_gradient(self, t):
        n = self.norm
        wanted = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(self.grad[t], self.x[t], n.normalized_shape, self.mean[t],
                                                         self.rstd[t], n.weight, n.bias, wanted)[0]

    def weight_gradients(self):
        n = self.norm
        wanted = [False, True, True]
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(self.grad, self.x, n.normalized_shape, self.mean,
                                                                    self.rstd, n.weight, n.bias, wanted)
        return [(n.weight, weight), (n.bias, bias)]


def _linear_gradients(linear, grad, x):
    """Return a linear layer's [(parameter, gradient)], given output gradients and inputs x."""
    grad, x = grad.flatten(0, 1), x.flatten(0, 1)
    return [(linear.weight, grad.T @ x), (linear.bias, grad.sum(0))]


class _FFNTape:
    """Feed-forward branch: LayerNorm, Linear, GELU, Linear."""

    def __init__(self, ffn, e):
        T, B, _ = e.shape
        self.ffn = ffn
        self.norm = _NormTape(ffn.norm, e.new_empty(T, B, ffn.up.in_features))
        self.inner = e.new_empty(T, B, ffn.up.out_features)  # before GELU

    def step(self, t, x):
        up, down = self.ffn.up, self.ffn.down
        torch.addmm(up.bias, self.norm.step(t, x), up.weight.T, out=self.inner[t])
        return torch.addmm(down.bias, F.gelu(self.inner[t]), down.weight.T)

    def start_back(self):
        self.norm.start_back()
        self.grad_inner = torch.empty_like(self.inner)
        self.grad = self.inner.new_empty(*self.inner.shape[:2], self.ffn.down.out_features)

    def back(self, t, grad):
        self.grad[t] = grad
        grad_gelu = grad @ self.ffn.down.weight
        torch.ops.aten.gelu_backward.grad_input(grad_gelu, self.inner[t], grad_input=self.grad_inner[t])
        return self.norm.back(t, self.ffn.up.weight, self.grad_inner[t])

    def weight_gradients(self):
        return [*self.norm.weight_gradients(), *_linear_gradients(self.ffn.up, self.grad_inner, self.norm.y),
                *_linear_gradients(self.ffn.down, self.grad, F.gelu(self.inner))]


class _AttentionTape:
    """Attention branch: LayerNorm, rotary causal attention in a window, output projection.

    q, k, v: (B H, T, D). Probabilities: (B H, T, W), W = window + 1; the last column is the query's
    own position. A query's probabilities are the end of a row, a key's are a diagonal:

        W = 3        column 0 1 2
        query t = 0         . . 0          entries are key positions; key 1 is on the diagonal
              t = 1         . 0 1          from (t = 1, column 2) down to the left
              t = 2         0 1 2
              t = 3         1 2 3
    """

    def __init__(self, block, e, rope, doc_start, reach):
        T, B, C = e.shape
        H = C // block.head_size
        self.block, self.doc_start, self.shape = block, doc_start, (B, H, C // H)
        self.W = min(reach + 1, T)
        self.norm = _NormTape(block.attn_norm, e.new_empty(T, B, C))
        self.q, self.k, self.v = (e.new_empty(B * H, T, C // H) for _ in range(3))  # q: rotated, scaled; k: rotated
        self.p = e.new_empty(B * H, T, self.W)
        self.mixed = e.new_empty(T, B, C)  # inputs of the output projection
        cos, sin = (table.to(e.dtype).unsqueeze(1) for table in rope)  # (T, 1, 1, D)
        scale = (C // H) ** -0.5
        self.cos, self.sin = (torch.cat([table * scale, table], 1) for table in (cos, sin))  # (T, 2, 1, D): q, k

    def _rotate(self, qk, t, direction):
        """Rotate q and k (B, 2, H, D), and scale q. direction = -1: the transposed map."""
        return torch.addcmul(qk * self.cos[t], qk.roll(qk.shape[-1] // 2, -1), self.sin[t], value=direction)

    def _key_diagonal(self, x, t):
        """Return the entries of key t in x (B H, T, W), one per query that sees it, (B H, 1, n)."""
        T, W = x.shape[1:]
        return x.as_strided((len(x), 1, min(W, T - t)), (T * W, 1, W - 1), t * W + W - 1)

    def step(self, t, x):
        (B, H, D), block = self.shape, self.block
        first_key = max(0, t + 1 - self.W)
        qkv = torch.addmm(block.qkv.bias, self.norm.step(t, x), block.qkv.weight.T).view(B, 3, H, D)
        qk = self._rotate(qkv[:, :2], t, 1)
        for kept, new in ((self.q, qk[:, 0]), (self.k, qk[:, 1]), (self.v, qkv[:, 2])):
            kept.view(B, H, -1, D)[:, :, t] = new
        scores = self.q[:, t:t + 1] @ self.k[:, first_key:t + 1].transpose(1, 2)
        if self.doc_start is not None:
            before = torch.arange(first_key, t + 1, device=scores.device) < self.doc_start[:, t:t + 1]
            scores.view(B, H, -1).masked_fill_(before.unsqueeze(1), -math.inf)
        p = scores.softmax(-1)
        self.p[:, t:t + 1, first_key - t - 1:] = p
        torch.bmm(p, self.v[:, first_key:t + 1], out=self.mixed[t].view(B * H, 1, D))
        return torch.addmm(block.attn_out.bias, self.mixed[t], block.attn_out.weight.T)

    def start_back(self):
        self.norm.start_back()
        self.grad, self.grad_mixed = torch.empty_like(self.mixed), torch.empty_like(self.q)
        self.grad_scores = torch.empty_like(self.p)
        self.grad_qkv = self.mixed.new_empty(*self.mixed.shape[:2], 3 * self.mixed.shape[2])

    def back(self, t, grad):
        (B, H, D), block = self.shape, self.block
        first_key, queries = max(0, t + 1 - self.W), slice(t, t + self.W)  # first key t sees; queries that see t
        self.grad[t] = grad
        grad_mixed = (grad @ block.attn_out.weight).view(B * H, 1, D)
        self.grad_mixed[:, t:t + 1] = grad_mixed
        p = self.p[:, t:t + 1, first_key - t - 1:]
        grad_p = grad_mixed @ self.v[:, first_key:t + 1].transpose(1, 2)
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        self.grad_scores[:, t:t + 1, first_key - t - 1:] = grad_scores
        out = self.grad_qkv[t].view(B, 3, H, D)
        grad_q = grad_scores @ self.k[:, first_key:t + 1]
        grad_k = self._key_diagonal(self.grad_scores, t) @ self.q[:, queries]
        out[:, :2] = self._rotate(torch.cat([x.view(B, 1, H, D) for x in (grad_q, grad_k)], 1), t, -1)
        out[:, 2] = (self._key_diagonal(self.p, t) @ self.grad_mixed[:, queries]).view(B, H, D)
        return self.norm.back(t, block.qkv.weight, self.grad_qkv[t])

    def weight_gradients(self):
        return [*self.norm.weight_gradients(), *_linear_gradients(self.block.qkv, self.grad_qkv, self.norm.y),
                *_linear_gradients(self.block.attn_out, self.grad, self.mixed)]


class _CorrectionTape:
    """Correction network (eq. 1), all variants."""

    def __init__(self, model, e, doc_start):
        self.variant, self.e = model.config.variant, e
        if self.variant == 'block_head':
            self.net = _NormTape(model.correction, torch.empty_like(e))
        else:
            self.net = _FFNTape(model.correction, e)
        self.z_mask = None  # (T, B, 1), 0 where a document starts
        if doc_start is not None:
            self.z_mask = (doc_start != torch.arange(len(e), device=e.device)).T.unsqueeze(-1).to(e.dtype)

    def step(self, t, z):
        if self.z_mask is not None:
            z = z * self.z_mask[t]
        if self.variant == 'concat':
            return self.net.step(t, torch.cat([z, self.e[t]], -1))
        if self.variant in ('token_blind', 'block_head'):
            return self.net.step(t, z)
        return self.net.step(t, z + self.e[t])

    def start_back(self):
        self.net.start_back()

    def back(self, t, grad):
        """Return the gradients of the previous position's z, and of e[t] or None."""
        if self.variant == 'block_head':
            self.net.grad[t] = grad
            through_z, through_e = self.net._input_gradient(t), None
        else:
            grad = self.net.back(t, grad)
            through_z = through_e = grad
            if self.variant == 'concat':
                through_z, through_e = grad.chunk(2, -1)
            elif self.variant == 'token_blind':
                through_e = None
        if self.z_mask is not None:
            through_z = through_z * self.z_mask[t]
        return through_z, through_e

    def weight_gradients(self):
        return self.net.weight_gradients()
