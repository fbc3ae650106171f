"""Context-Ready's Algorithm 1 over whole windows, and its exact gradient."""
import math

import torch
import torch.nn.functional as F


class Scan(torch.autograd.Function):
    """Algorithm 1 over whole windows, and its exact gradient.

    The forward keeps what each position's layers read. The backward runs only the gradient of the state through time, from the
    last position to the first, and notes it down; every weight's gradient is one large product over all positions afterwards.
    e (B, T, C), doc_start (B, T) or None, dropout (1 + 2 D, T, B, C) factors or None -> z (B, T, C).
    """

    @staticmethod
    def forward(ctx, model, e, doc_start, dropout, rope, *params):
        c, T = model.config, e.shape[1]
        e = e.transpose(0, 1).contiguous()  # positions first, so that one of them is one block of memory
        correct = _CorrectionTape(model, e, doc_start)
        layers = [tape for block in model.blocks for tape in (_AttentionTape(block.attn, e, rope, doc_start, c.window), _FFNTape(block.ffn, e))]
        z = torch.empty_like(e)
        for t in range(T):
            x = e[t] + correct.step(t, z[t - 1] if t else torch.zeros_like(e[0]))
            if dropout is not None:
                x *= dropout[0, t]
            for i, tape in enumerate(layers):
                y = tape.step(t, x)
                x = x + y if dropout is None else torch.addcmul(x, y, dropout[1 + i, t])
            z[t] = x
        ctx.save_for_backward(*params)  # so that a change of the weights in between is an error
        ctx.tapes, ctx.dropout, ctx.params = (correct, layers), dropout, model._scanned()
        return z.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        _, (correct, layers), dropout = ctx.saved_tensors, ctx.tapes, ctx.dropout
        ctx.tapes = None  # the loss may live on
        grad = grad.transpose(0, 1).contiguous()
        grad_e = torch.empty_like(grad)
        through_z = torch.zeros_like(grad[0])  # from the position after
        for tape in (correct, *layers):
            tape.start_back()
        for t in reversed(range(len(grad))):
            g = grad[t] + through_z
            for i, tape in reversed(list(enumerate(layers))):
                g = g + tape.back(t, g if dropout is None else g * dropout[1 + i, t])
            if dropout is not None:
                g = g * dropout[0, t]
            through_z, through_e = correct.back(t, g)
            grad_e[t] = g if through_e is None else g + through_e
        grads = {}
        for tape in (correct, *layers):
            for p, g in tape.weight_gradients():
                grads[p] = grads[p] + g if p in grads else g  # `tied` uses some twice
        return None, grad_e.transpose(0, 1), None, None, None, *(grads[p] for p in ctx.params)


class _NormTape:
    """LayerNorm over positions one after another. buffers (T, B, n)."""

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
        return torch.ops.aten.native_layer_norm_backward(self.grad[t], self.x[t], n.normalized_shape, self.mean[t], self.rstd[t], n.weight, n.bias,
                                                         [True, False, False])[0]

    def weight_gradients(self):
        n = self.norm
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(self.grad, self.x, n.normalized_shape, self.mean, self.rstd, n.weight, n.bias,
                                                                    [False, True, True])
        return [(n.weight, weight), (n.bias, bias)]


def _linear_gradients(linear, grad, x):
    """[(parameter, gradient)] of a linear layer from the gradients of its outputs and its inputs, (T, B, n) each."""
    grad, x = grad.flatten(0, 1), x.flatten(0, 1)
    return [(linear.weight, grad.T @ x), (linear.bias, grad.sum(0))]


class _FFNTape:
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
        self.grad = torch.empty(*self.inner.shape[:2], self.ffn.down.out_features, device=self.inner.device, dtype=self.inner.dtype)

    def back(self, t, grad):
        self.grad[t] = grad
        torch.ops.aten.gelu_backward.grad_input(grad @ self.ffn.down.weight, self.inner[t], grad_input=self.grad_inner[t])
        return self.norm.back(t, self.ffn.up.weight, self.grad_inner[t])

    def weight_gradients(self):
        return [*self.norm.weight_gradients(), *_linear_gradients(self.ffn.up, self.grad_inner, self.norm.y),
                *_linear_gradients(self.ffn.down, self.grad, F.gelu(self.inner))]


class _AttentionTape:
    """Of queries, keys and values (B H, T, D) a window is a slice. Probabilities are (B H, T, W), the W = w + 1 keys that a query may
    see aligned to the right: a query's are the end of a row, a key's a diagonal."""

    def __init__(self, attn, e, rope, doc_start, window):
        T, B, C = e.shape
        H = attn.n_head
        self.attn, self.doc_start, self.shape = attn, doc_start, (B, H, C // H)
        self.W = T if window is None else min(window + 1, T)
        self.norm = _NormTape(attn.norm, e.new_empty(T, B, C))
        self.q, self.k, self.v = (e.new_empty(B * H, T, C // H) for _ in range(3))  # q rotated and scaled, k rotated
        self.p = e.new_empty(B * H, T, self.W)
        self.mixed = e.new_empty(T, B, C)  # what the output projection reads
        cos, sin = (table.to(e.dtype).unsqueeze(1) for table in rope)  # (T, 1, 1, D / 2)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        self.cos, self.sin = (torch.cat([table * (C // H) ** -0.5, table], 1) for table in (cos, sin))  # (T, 2, 1, D): of q, scaled, and of k

    def _rotate(self, qk, t, direction):
        """qk (B, 2, H, D) turned by its angle, q scaled too; direction -1: the transposed map."""
        return torch.addcmul(qk * self.cos[t], qk.roll(qk.shape[-1] // 2, -1), self.sin[t], value=direction)

    def _of_key(self, x, t):
        """What the queries from t on have in x (B H, T, W) for key t: (B H, 1, queries)."""
        T, W = x.shape[1:]
        return x.as_strided((len(x), 1, min(W, T - t)), (T * W, 1, W - 1), t * W + W - 1)

    def step(self, t, x):
        (B, H, D), attn, first = self.shape, self.attn, max(0, t + 1 - self.W)
        qkv = torch.addmm(attn.qkv.bias, self.norm.step(t, x), attn.qkv.weight.T).view(B, 3, H, D)
        qk = self._rotate(qkv[:, :2], t, 1)
        for x, new in ((self.q, qk[:, 0]), (self.k, qk[:, 1]), (self.v, qkv[:, 2])):
            x.view(B, H, -1, D)[:, :, t] = new
        scores = self.q[:, t:t + 1] @ self.k[:, first:t + 1].transpose(1, 2)
        if self.doc_start is not None:
            before = torch.arange(first, t + 1, device=scores.device) < self.doc_start[:, t:t + 1]
            scores.view(B, H, -1).masked_fill_(before.unsqueeze(1), -math.inf)
        p = scores.softmax(-1)
        self.p[:, t:t + 1, first - t - 1:] = p
        torch.bmm(p, self.v[:, first:t + 1], out=self.mixed[t].view(B * H, 1, D))
        return torch.addmm(attn.out.bias, self.mixed[t], attn.out.weight.T)

    def start_back(self):
        self.norm.start_back()
        self.grad, self.grad_scores, self.grad_mixed = torch.empty_like(self.mixed), torch.empty_like(self.p), torch.empty_like(self.q)
        self.grad_qkv = self.mixed.new_empty(*self.mixed.shape[:2], 3 * self.mixed.shape[2])

    def back(self, t, grad):
        (B, H, D), attn, first, later = self.shape, self.attn, max(0, t + 1 - self.W), slice(t, t + self.W)
        self.grad[t] = grad
        grad_mixed = (grad @ attn.out.weight).view(B * H, 1, D)
        self.grad_mixed[:, t:t + 1] = grad_mixed
        p = self.p[:, t:t + 1, first - t - 1:]
        grad_scores = torch._softmax_backward_data(grad_mixed @ self.v[:, first:t + 1].transpose(1, 2), p, -1, p.dtype)
        self.grad_scores[:, t:t + 1, first - t - 1:] = grad_scores
        out = self.grad_qkv[t].view(B, 3, H, D)
        parts = grad_scores @ self.k[:, first:t + 1], self._of_key(self.grad_scores, t) @ self.q[:, later]
        out[:, :2] = self._rotate(torch.cat([x.view(B, 1, H, D) for x in parts], 1), t, -1)
        out[:, 2] = (self._of_key(self.p, t) @ self.grad_mixed[:, later]).view(B, H, D)
        return self.norm.back(t, attn.qkv.weight, self.grad_qkv[t])

    def weight_gradients(self):
        return [*self.norm.weight_gradients(), *_linear_gradients(self.attn.qkv, self.grad_qkv, self.norm.y),
                *_linear_gradients(self.attn.out, self.grad, self.mixed)]


class _CorrectionTape:
    """Eq. 1 in all its variants."""

    def __init__(self, model, e, doc_start):
        self.variant, self.e = model.config.variant, e
        self.net = _NormTape(model.correction, torch.empty_like(e)) if self.variant == 'block_head' else _FFNTape(model.correction, e)
        self.later = None  # 0 where a document starts, (T, B, 1)
        if doc_start is not None:
            self.later = (doc_start != torch.arange(len(e), device=e.device)).T.unsqueeze(-1).to(e.dtype)

    def step(self, t, z):
        if self.later is not None:
            z = z * self.later[t]
        if self.variant == 'concat':
            return self.net.step(t, torch.cat([z, self.e[t]], -1))
        return self.net.step(t, z if self.variant in ('token_blind', 'block_head') else z + self.e[t])

    def start_back(self):
        self.net.start_back()

    def back(self, t, grad):
        """Gradients of z of the position before, and of e[t] or None."""
        if self.variant == 'block_head':
            self.net.grad[t] = grad
            through_z, through_e = self.net._input_gradient(t), None
        else:
            grad = self.net.back(t, grad)
            through_z, through_e = grad.chunk(2, -1) if self.variant == 'concat' else (grad, None if self.variant == 'token_blind' else grad)
        return through_z if self.later is None else through_z * self.later[t], through_e

    def weight_gradients(self):
        return self.net.weight_gradients()
