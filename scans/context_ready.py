"""The fast form of model_context_ready's `loop`: Algorithm 1 over whole windows, with a hand-written exact gradient.

    forward                                       backward

    t = 0 ... T-1                                 t = T-1 ... 0
      correction from z[t-1] and e[t]               g = gradient of z[t], from the loss and from position t + 1
      each layer: x = x + branch(x)                 each layer, last first: g = g + branch's gradient of its input
      z[t] = x                                      the correction: gradients of z[t-1] and of e[t]

A position is a few small products and many small operators, so what counts is how few there are. Each residual branch
has a tape. In the forward a tape writes down, position by position, what its branch reads: the inputs of its norm, of
its GELU, its queries, keys, values and probabilities. In the backward it is read from the end, and takes down the
gradient of each product's output beside it. Only the gradient of the state runs through time: every weight's gradient
is one large product over all positions afterwards.

    step(t, x)           the branch at position t (B, C); notes what it reads
    start_back()         what can be computed for all positions at once
    back(t, grad)        gradient of the branch's input at t from that of its output; notes both
    weight_gradients()   [(parameter, gradient)]

    T positions, B batch, C width, H heads, D head size, W keys that a query may see
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import attn_kernels

PIN = '9d6fda2f3cca65f9'


def implements(model_file):
    """What this file re-implements: an edit of any of these would have no effect here."""
    m, k = model_file, attn_kernels
    return [m.FFN, m.Block, m.Model.__init__, m.Model.sees, m.Model.correct, m.Model.step, m.Model.loop, k.rotate,
            k.attention, k._dense_sdpa]


def stream(model, idx, graphs=True):
    """Algorithm 1 over whole windows, in the dtype of the weights, differentiable. idx (B, T) -> z (B, T, C).

    In training on a GPU forward and backward are one CUDA graph each, unless graphs is False: run the backward before
    the next forward.
    """
    c = model.config
    e, doc_start, _, rope = model.prepare(idx)
    B, T, C = e.shape
    dropout = None  # factors: on what enters the blocks, then on the two branches of each block
    if c.dropout and model.training:
        dropout = F.dropout(e.new_ones(1 + 2 * c.n_layer, T, B, C), c.dropout)
    params = _parameters(model)
    # A graph reads the weights where they lay when it was recorded. So none is recorded for weights that
    # functional_call lends for one call, or that FSDP gathers anew for each step.
    stay = all(isinstance(p, nn.Parameter) for p in params) and not hasattr(model, 'set_requires_gradient_sync')
    records = graphs and e.is_cuda and torch.is_grad_enabled() and stay
    inputs = e, *rope, doc_start, dropout
    return _recorded(model, inputs, params) if records else Scan.apply(model, *inputs, *params)


def _parameters(model):
    """The parameters that `Scan` gives gradients."""
    return list(dict.fromkeys([*model.blocks.parameters(), *model.correction.parameters()]))  # `tied` has some twice


def _recorded(model, inputs, params):
    """`Scan` by CUDA graphs of its forward and backward, one of each for every shape and place of the weights."""
    graphs = vars(model).setdefault('scan_graphs', {})
    is_given = [x is not None for x in inputs]
    given = [x for x in inputs if x is not None]  # a graph's inputs are tensors

    def scan(*tensors):
        rest = iter(tensors)
        return Scan.apply(model, *(next(rest) if there else None for there in is_given), *rest)

    key = inputs[0].shape, model.reach, *is_given, *(p.data_ptr() for p in params)
    if key not in graphs:
        e, *others = given
        e, *own = (x.detach().clone().requires_grad_() for x in (e, *params))
        graphs[key] = torch.cuda.make_graphed_callables(scan, (e, *others, *own))
    # the next replay overwrites the graph's gradients, which p.grad would take as they are: `p * 1` has them copied
    return graphs[key](*given, *(p * 1 for p in params))


class Scan(torch.autograd.Function):
    """e (B, T, C), cos and sin of the positions, doc_start (B, T) or None, dropout (1 + 2 n_layer, T, B, C) factors or
    None -> z (B, T, C)."""

    @staticmethod
    def forward(ctx, model, e, cos, sin, doc_start, dropout, *params):
        T = e.shape[1]
        e = e.transpose(0, 1).contiguous()  # positions first, so that one of them is one block of memory
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
        ctx.save_for_backward(*params)  # so that a change of the weights in between is an error
        # params may stand in for the model's own (`_recorded`), by which tapes name gradients
        ctx.tapes, ctx.dropout, ctx.params = (correct, branches), dropout, _parameters(model)
        return z.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        _, (correct, branches), dropout = ctx.saved_tensors, ctx.tapes, ctx.dropout
        ctx.tapes = None  # the loss may live on
        grad = grad.transpose(0, 1).contiguous()
        grad_e, through_z, grads = torch.empty_like(grad), torch.zeros_like(grad[0]), {}
        with torch.autocast(grad.device.type, enabled=False):
            for tape in (correct, *branches):
                tape.start_back()
            for t in reversed(range(len(grad))):
                g = grad[t] + through_z  # of z[t], which position t + 1 reads
                for i, tape in reversed(list(enumerate(branches))):
                    g = g + tape.back(t, g if dropout is None else g * dropout[1 + i, t])
                if dropout is not None:
                    g = g * dropout[0, t]
                through_z, through_e = correct.back(t, g)
                grad_e[t] = g if through_e is None else g + through_e
            for tape in (correct, *branches):
                for p, g in tape.weight_gradients():
                    grads[p] = grads[p] + g if p in grads else g  # `tied` uses some twice
        return None, grad_e.transpose(0, 1), *[None] * 4, *(grads[p] for p in ctx.params)


class _NormTape:
    """LayerNorm before a linear layer, x (T, B, n) its inputs. `back` takes that layer's weight and the gradient of its
    output."""

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
        """The gradient of x[t], given that of the product with a weight after the norm."""
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
    """[(parameter, gradient)] of a linear layer from the gradients of its outputs and its inputs, (T, B, n) each."""
    grad, x = grad.flatten(0, 1), x.flatten(0, 1)
    return [(linear.weight, grad.T @ x), (linear.bias, grad.sum(0))]


class _FFNTape:
    """LayerNorm, Linear, GELU, Linear."""

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
    """LayerNorm, rotary causal attention over a window, output projection.

    Of queries, keys and values (B H, T, D) a window is a slice. Probabilities are (B H, T, W) of the W = w + 1 keys
    that a query may see, its own in the last column. A query's are the end of a row, a key's a diagonal:

        W = 3        column 0 1 2
        query t = 0         . . 0          the number: which key. Key 1's probabilities are read
              t = 1         . 0 1          downwards to the left
              t = 2         0 1 2
              t = 3         1 2 3
    """

    def __init__(self, block, e, rope, doc_start, reach):
        T, B, C = e.shape
        H = C // block.head_size
        self.block, self.doc_start, self.shape = block, doc_start, (B, H, C // H)
        self.W = min(reach + 1, T)
        self.norm = _NormTape(block.attn_norm, e.new_empty(T, B, C))
        self.q, self.k, self.v = (e.new_empty(B * H, T, C // H) for _ in range(3))  # q rotated and scaled, k rotated
        self.p = e.new_empty(B * H, T, self.W)
        self.mixed = e.new_empty(T, B, C)  # what the output projection reads
        cos, sin = (table.to(e.dtype).unsqueeze(1) for table in rope)  # (T, 1, 1, D)
        scale = (C // H) ** -0.5
        self.cos, self.sin = (torch.cat([table * scale, table], 1) for table in (cos, sin))  # (T, 2, 1, D): of q, of k

    def _rotate(self, qk, t, direction):
        """qk (B, 2, H, D) turned by its angle, q scaled too; direction -1: the transposed map."""
        return torch.addcmul(qk * self.cos[t], qk.roll(qk.shape[-1] // 2, -1), self.sin[t], value=direction)

    def _of_key(self, x, t):
        """What the queries from t on have in x (B H, T, W) for key t: (B H, 1, queries)."""
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
        first_key, queries = max(0, t + 1 - self.W), slice(t, t + self.W)  # that it sees; that see it
        self.grad[t] = grad
        grad_mixed = (grad @ block.attn_out.weight).view(B * H, 1, D)
        self.grad_mixed[:, t:t + 1] = grad_mixed
        p = self.p[:, t:t + 1, first_key - t - 1:]
        grad_p = grad_mixed @ self.v[:, first_key:t + 1].transpose(1, 2)
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        self.grad_scores[:, t:t + 1, first_key - t - 1:] = grad_scores
        out = self.grad_qkv[t].view(B, 3, H, D)
        grad_q = grad_scores @ self.k[:, first_key:t + 1]
        grad_k = self._of_key(self.grad_scores, t) @ self.q[:, queries]
        out[:, :2] = self._rotate(torch.cat([x.view(B, 1, H, D) for x in (grad_q, grad_k)], 1), t, -1)
        out[:, 2] = (self._of_key(self.p, t) @ self.grad_mixed[:, queries]).view(B, H, D)
        return self.norm.back(t, block.qkv.weight, self.grad_qkv[t])

    def weight_gradients(self):
        return [*self.norm.weight_gradients(), *_linear_gradients(self.block.qkv, self.grad_qkv, self.norm.y),
                *_linear_gradients(self.block.attn_out, self.grad, self.mixed)]


class _CorrectionTape:
    """Eq. 1 in all its variants."""

    def __init__(self, model, e, doc_start):
        self.variant, self.e = model.config.variant, e
        if self.variant == 'block_head':
            self.net = _NormTape(model.correction, torch.empty_like(e))
        else:
            self.net = _FFNTape(model.correction, e)
        self.z_mask = None  # 0 where a document starts, (T, B, 1)
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
        """Gradients of z of the position before, and of e[t] or None."""
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
