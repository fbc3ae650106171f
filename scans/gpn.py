"""A fast `Model.loop` for model_gpn on a GPU: `scan_states`.

    scans/gpn.py        weights and their gradients, segments
    scans/gpn_gpu.py    the steps of a segment, as a CUDA graph. It has the operations below as
                        plain PyTorch functions, and a Triton kernel for each but `gated_add_norm`,
                        which torch.compile fuses

On a CPU, recurrent.py runs `Model.step` itself.

A step is `Model.step`, regrouped. Given the token's u, it turns the state s, the key k of the next
write and the memory M into those after the token. n(x) is x / sqrt(|x|^2 + eps^2), `l2_normalize`:

    x = sigmoid(W_f n(s) + b_f) s + u                       eq. 4           gated_add_norm
    each layer: gate_in, memory_in, glu_in = W n(x) + b                     one product
        q, next k, v, beta, decay of memory_in              eq. 8, 9        memory_inputs
        M = decay M + beta k (v - M^T k)^T,  r = M^T q      eq. 10, 11      delta_step
        y = silu(z1) (z2, n(r)),  z1, z2 = glu_in           eq. 5, 11       glu
        x = sigmoid(gate_in) x + W' y                       eq. 5, 7, 11    gated_add_norm
    s = x

* Each RMSNorm is n(x) times a weight, which is folded into the next matrix (`fold`). So all
  matrices that read x are one product of n(x). Only the first layer writes to the memory.
* The next write needs only a key made from the grounded state, so k is kept, not that state.
* Only the gradients of s, k and M are computed step by step. Each weight's gradient is one large
  product per segment (`scan_backward`).

To change an equation, change all of its places below, and `paper_states` in test_gpn.py. For
beta in eq. 9, they are in row memory_inputs: the plain function and both kernels. Then, in this
order:

    pytest tests/models/test_gpn.py   equations with `paper_states`
    pytest tests/scans -k gpn         kernels with their plain functions, and with `Model.loop`. The
                                      test of pins shows the new pin; EDITS quote a line of eq. 10
    PINS = {new pin}                  enables the kernels; an old pin would run the new equation for
                                      copies of the old model_gpn.py

Without Triton, the kernels are not compared, but the pin enables them. Only a GPU captures CUDA
graphs and compiles `gated_add_norm` and its backward: repeat tests/scans/test_gpn_scan.py there.

In the table, "it" is the function of that name in gpn_gpu.py, and "here" is this file.

    gated_add_norm  it, `norm_and_gate_backward`, `gated`, `recompute`: state after eq. 4, `steps`:
                    n(s), `backward`: slope, du; here `Sizes.eps`, `fold`: `times_norm`
    memory_inputs   it, its two kernels, `_normalized_key`, `_softplus`, `key_of`, `load`; here
                    `KEY_EPS`, `Sizes.key_of`, and `fold`: exp(A), first key
    delta_step      it, its two kernels; above layer one, `read_heads`, `read_backward`
    glu             it, its two kernels; here `Sizes.eps` and `fold`: weight of the read's norm
    columns of z    as memory_inputs, and `recompute`; here `fold`, `columns`, `next_key`
    documents, and  carry, first_key, dfirst, next_carry, is_cut; here `scan_forward` and
    cuts of BPTT    `scan_backward`

Memory in training, for R segments of at most S = segment_len steps: u and states (L + 1) T B C,
products T B P with P = C + L (C + 2F) + H ((L + 1) K + (2L + 1) D + 2), and M at each segment's
start, R B H K D. The backward adds (S + 1) B H K D for one segment's M and a few times S B P. M of
all T steps is never stored. Letters as in model_gpn.py.
"""
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from . import kernels_on_cpu, triton
from .gpn_gpu import Graph, KernelSteps, key_of

PINS = {'da676f419073f57f'}  # digests of what `implements` lists
SMALL = dict(n_layer=2, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, segment_len=5,
             eos_id=59, bptt_len=7)  # a model with most branches, for tests

WHERE = ' on a GPU'  # for the warning that an edit is not implemented here
KEY_EPS = 1e-6  # eps of `l2_normalize` in model_gpn.py


def implements(model_file):
    """Return the code that this file re-implements, so that edits to it are detected."""
    m = model_file
    return [m.RMSNorm, m.l2_normalize, m.read, m.delta_rule, m.Write, m.Model.write_type, m.Layer, m.choose_rows,
            m.Model.__init__, m.Model.ground, m.Model.predict, m.Model.step, m.Model.first_state, m.Model.loop]


def runs_on(device):
    """Return True on a GPU with Triton, and in Triton's interpreter."""
    return device.type == 'cuda' and triton is not None or kernels_on_cpu()


# ---- weights: norms folded in, one product for everything that reads the same vector ----
#
# z       input product of a layer, (S, B, columns). [...]: first layer only; z1: F and HD, z2: F
#           | gate C | query HK [key HK, value HD, beta H, decay H] | z1, z2 |
#             gate_in  memory_in                                      glu_in
# folded  ground W, b | per layer: input W, b, output W' | decay rates (H,) | key of a zero state
# saved   states of the layers (the last apart, as `out`) | ground z | per layer: z, read r
# pairs   ground (dz, n(s)) | per layer: (dz, n(x)), (dout, y). (a, b): a weight's gradient is a^T b


class Sizes(NamedTuple):
    """Sizes that the scan needs from a Config."""

    n_embd: int
    n_ffn: int
    n_head: int
    d_k: int
    d_v: int
    n_layer: int
    segment_len: int
    bptt_len: int  # 2**30 if gradients are never cut

    @classmethod
    def from_config(cls, config):
        return cls(*(getattr(config, name) for name in cls._fields[:-1]), config.bptt_len or 2 ** 30)

    def segments(self, T):
        """Return [(start, end)] of the segments; the backward recomputes M for one at a time."""
        starts = sorted({*range(0, T, self.segment_len), *range(0, T, self.bptt_len)})
        return list(zip(starts, [*starts[1:], T]))

    def eps(self, norm_eps):
        """Return `l2_normalize`'s eps for states, reads (equivalent to RMSNorm's) and keys."""
        return (self.n_embd * norm_eps) ** 0.5, (self.n_head * self.d_v * norm_eps) ** 0.5, KEY_EPS

    def key_of(self, z):
        """Return the keys (..., H, K) of projections z (..., HK)."""
        return key_of(z, (self.n_head, self.d_k), KEY_EPS)

    def columns(self, layer):
        """Return the widths of gate_in, memory_in and glu_in."""
        writes = self.n_head * (self.d_k + self.d_v + 2) if layer == 0 else 0
        return [self.n_embd, self.n_head * self.d_k + writes, 2 * self.n_ffn + self.n_head * self.d_v]

    def next_key(self):
        """Return the columns of z, in the first layer, with the key of the next write."""
        start, width = self.n_embd + self.n_head * self.d_k, self.n_head * self.d_k
        return slice(start, start + width)

    def saved_widths(self):
        """Return the widths of the saved products: ground gate; per layer, input product, read."""
        read = self.n_head * self.d_v
        return sum(([sum(self.columns(layer)), read] for layer in range(self.n_layer)), [self.n_embd])


def fold(model):
    """Return `folded`: a GPN's weights, with the norms' weights folded in.

    Autograd differentiates this function: the backward by hand ends at its results.
    """
    c, write = model.config, model.write
    root = c.n_embd ** 0.5  # RMSNorm is `l2_normalize` times this and its weight

    def times_norm(linear, norm):
        return linear.weight * (norm.weight * root)

    weights = [times_norm(model.ground_gate, model.ground_norm), model.ground_gate.bias]
    for i, layer in enumerate(model.layers):
        z1, z2 = times_norm(layer.gate_up, layer.ffn_norm).chunk(2)
        w_in, b_in, w_out = [times_norm(layer.gate, layer.gate_norm)], [layer.gate.bias], layer.ffn_out.weight
        if write is not None:
            w_in.append(times_norm(layer.query, layer.read_norm))
            b_in.append(layer.query.bias)
            z1 = torch.cat([z1, times_norm(layer.read_gate, layer.read_norm)])
            read_weight = layer.out_norm.weight * len(layer.out_norm.weight) ** 0.5
            w_out = torch.cat([w_out, layer.read_out.weight * read_weight], 1)
        if write is not None and i == 0:
            w_in += [times_norm(linear, write.norm) for linear in (write.key, write.value, write.beta, write.decay)]
            no_bias = write.dt_bias.new_zeros(write.value.out_features + write.beta.out_features)
            b_in += [write.key.bias, no_bias, write.dt_bias]
        b_in.append(z1.new_zeros(len(z1) + len(z2)))
        weights += [torch.cat([*w_in, z1, z2]), torch.cat(b_in), w_out]
    if write is None:
        return [*weights, z1.new_zeros(0), z1.new_zeros(0, c.d_k)]
    return [*weights, write.log_rate.exp(), Sizes.from_config(c).key_of(write.key.bias)]


# ---- the operator: all steps of a batch, a custom op, so that the compiler sees no loop ----

@functools.cache
def _kernels_of(folded_shapes, sizes, norm_eps, dtype, device):
    return KernelSteps([torch.empty(shape, device=device) for shape in folded_shapes], sizes, norm_eps, dtype)


def get_steps(folded, sizes, norm_eps, dtype):
    """Return the steps with these weights. Objects are reused: they hold CUDA graphs."""
    shapes = tuple(x.shape for x in folded)
    return _kernels_of(shapes, sizes, norm_eps, dtype, folded[0].device).load(folded)


def uses_graphs(device):
    """Return True on a GPU: the kernels of a segment are too small to be launched one by one."""
    return device.type == 'cuda'


def run_segment(steps, function, inputs, is_usual):
    """Call a method of `steps`; on a GPU, as a CUDA graph if the segment has the usual length."""
    if not is_usual or not uses_graphs(steps.first_key.device):
        return function(*inputs)
    key = function.__name__, *(getattr(x, 'shape', x) for x in tree_leaves(inputs))
    if key not in steps.graphs:
        with torch.inference_mode(False), torch.no_grad():  # training can reuse evaluation's graph
            steps.graphs[key] = Graph(function, inputs)
    return steps.graphs[key].replay(inputs)


def scan_forward(u: torch.Tensor, carry: torch.Tensor | None, folded: list[torch.Tensor], sizes: list[int],
                 norm_eps: float, dtype: torch.dtype, record: bool) -> list[torch.Tensor]:
    """Return the predicted states (T, B, C) and, if record, what the backward needs.

    u: (T, B, C); carry: (T, B, 1) or None. Recorded: the memory at the start of each segment, the
    states between layers, and the products, in dtype.
    """
    T, sizes = len(u), Sizes(*sizes)
    L, usual = sizes.n_layer, min(T, sizes.segment_len, sizes.bptt_len)
    with torch.autocast(u.device.type, enabled=False):
        steps = get_steps(folded, sizes, norm_eps, dtype)
        outputs = _empty_outputs(u, sizes, dtype, record)
        out, memories, *saved = outputs
        s, memory, k = torch.zeros_like(u[0]), torch.zeros_like(memories[0]), steps.first_key.repeat(u.shape[1], 1, 1)
        for r, (a, b) in enumerate(sizes.segments(T)):
            if record:
                memories[r] = memory
            inputs = s, k, memory, u[a:b], None if carry is None else carry[a:b]
            s, k, memory, step_outputs = run_segment(steps, steps.steps, inputs, b - a == usual)
            out[a:b] = step_outputs[L - 1]
            for x, part in zip(saved, (*step_outputs[:L - 1], *step_outputs[L:])):  # `saved` is empty without record
                x[a:b] = part
    return outputs


def _empty_outputs(u, sizes, dtype, record):
    """Allocate the results of `scan_forward`."""
    T, B, _ = u.shape
    R = len(sizes.segments(T)) if record else 1
    outputs = [torch.empty_like(u), u.new_empty(R, B, sizes.n_head, sizes.d_k, sizes.d_v)]
    if record:
        outputs += [torch.empty_like(u) for _ in range(sizes.n_layer - 1)]
        outputs += [u.new_empty(T, B, width, dtype=dtype) for width in sizes.saved_widths()]
    return outputs


def scan_backward(grad: torch.Tensor, u: torch.Tensor, carry: torch.Tensor | None, folded: list[torch.Tensor],
                  outputs: list[torch.Tensor], sizes: list[int], norm_eps: float,
                  dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of u and the folded weights. grad: gradient of the predicted states."""
    (T, B, C), sizes, (out, memories, *saved) = u.shape, Sizes(*sizes), outputs
    L, H, K, usual = sizes.n_layer, sizes.n_head, sizes.d_k, min(T, sizes.segment_len, sizes.bptt_len)

    def add_product(total, dout, x):
        dout, x = dout.flatten(0, 1).to(dtype), x.flatten(0, 1).to(dtype)
        if dtype == total.dtype:
            total.addmm_(dout.T, x)
        else:
            total.add_(dout.T @ x)

    with torch.autocast(u.device.type, enabled=False):
        steps, grad_u = get_steps(folded, sizes, norm_eps, dtype), torch.empty_like(u)
        totals = [torch.zeros_like(x, dtype=u.dtype) for x in folded]
        ds, dk, dm = u.new_zeros(B, C), u.new_zeros(B, H, K), torch.zeros_like(memories[0])
        for (a, b), memory in reversed(list(zip(sizes.segments(T), memories))):
            # the state before each step: the outputs, shifted by one
            s = out[a - 1:b - 1] if a else F.pad(out[:b - 1], (0, 0, 0, 0, 1, 0))
            k = steps.first_key.repeat(B, 1, 1)
            if a:  # the key from the previous step; saved[L] is the first layer's z
                k = sizes.key_of(saved[L][a - 1, :, sizes.next_key()].to(u.dtype))
            inputs = (u[a:b], None if carry is None else carry[a:b], (s, k, memory), (grad[a:b], ds, dk, dm),
                      [x[a:b] for x in saved], b < T and b % sizes.bptt_len == 0)
            grad_u[a:b], ds, dk, dm, drate, dfirst, pairs = run_segment(steps, steps.backward, inputs, b - a == usual)
            total = iter(totals)
            for i, (dout, x) in enumerate(pairs):
                add_product(next(total), dout, x)
                if i == 0 or i % 2:  # output products have no bias
                    next(total).add_(dout.sum((0, 1)))
            totals[-2] += drate
            totals[-1] += dfirst if a else dfirst + dk.sum(0)  # step 0 wrote with first_key
            # BPTT is cut: `loop` makes k from the detached g. Here step a - 1 made k, so dk goes on
            # to that step, where `is_cut` lets it reach the key's weights only
            if a % sizes.bptt_len == 0:
                ds, dm = torch.zeros_like(ds), torch.zeros_like(dm)
    return [grad_u, *(total.to(x.dtype) for total, x in zip(totals, folded))]


_NAMESPACE = __name__.replace('.', '_')
_scan_op = torch.library.custom_op(f'{_NAMESPACE}::scan', scan_forward, mutates_args=())
_scan_backward_op = torch.library.custom_op(f'{_NAMESPACE}::scan_backward', scan_backward, mutates_args=())


@_scan_op.register_fake
def _(u, carry, folded, sizes, norm_eps, dtype, record):
    return _empty_outputs(u, Sizes(*sizes), dtype, record)


@_scan_backward_op.register_fake
def _(grad, u, carry, folded, *_):
    return [torch.empty_like(x) for x in (u, *folded)]


def _save_for_backward(ctx, inputs, output):
    u, carry, folded, *ctx.numbers, _ = inputs
    ctx.save_for_backward(u, carry, *folded, *output)
    ctx.n_folded = len(folded)
    ctx.set_materialize_grads(False)


def _scan_backward(ctx, grads):
    u, carry, *tensors = ctx.saved_tensors
    folded, outputs = tensors[:ctx.n_folded], tensors[ctx.n_folded:]
    grad_u, *grad_folded = _scan_backward_op(grads[0].contiguous(), u, carry, folded, outputs, *ctx.numbers)
    return grad_u, None, grad_folded, *[None] * 4


_scan_op.register_autograd(_scan_backward, setup_context=_save_for_backward)


def scan_states(model, u, carry_mask=None):
    """Compute `Model.loop`: return the states (B, T, C). u: (B, T, C), fp32 or wider."""
    c, dtype, kind = model.config, model.fuse.weight.dtype, u.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:  # autocast ignores float64
        dtype = torch.get_autocast_dtype(kind)
    if carry_mask is not None:
        carry_mask = carry_mask.T.unsqueeze(-1).to(u.dtype, memory_format=torch.contiguous_format)
    return _scan_op(u.transpose(0, 1).contiguous(), carry_mask, fold(model), list(Sizes.from_config(c)), c.norm_eps,
                    dtype, torch.is_grad_enabled())[0].transpose(0, 1)
