"""Recurrences at full speed: compiles a model's own step, as its file writes it.

    step(*x, *state) -> state      one token. All are tensors (B, ...); the first one of the new
                                   state is also the output

`scan`, the last function, applies a step to T tokens, in segments of S. Three graphs of one token
are traced from the step and compiled by Inductor, once per shape. They run along a segment:

    forward     s_0 -> s_1 -> ... -> s_S      keeps s_0, and z_t of each product z = W y + b
    rebuild     s_0 -> s_1 -> ... -> s_S-1    in the backward pass: from z, without products
    backward   ds_0 <- ds_1 <- ... <- ds_S    also returns dx_t, and dz_t and y_t of each product

W's gradient is one large product per segment, sum_t dz_t^T y_t, and b's is sum_t dz_t. Those of
other parameters, such as norms' weights, are added token by token. Autograd sees a segment as one
operator, and DDP and FSDP see a parameter's gradient once. On a GPU, a segment is recorded as a
CUDA graph, and products have the dtype of autocast.

A step must not depend on values of tensors. Its trace freezes what Python computes, so random
numbers, and all tensors but parameters, have to be among x. It must not change the input of a
product in place. A parameter that it reads gets a gradient, if only of zeros.

    B  batch size    T  positions    S  tokens of a segment    x, state, z, ...: lists of tensors
    z  values of products, then results that operators keep (`keeps`, see products.py)
"""
import functools
import itertools
import os
import shutil
import sys

import torch
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from attn_kernels import NotCopied, at_least_fp32, outside_graphs

from . import products, triton, warn_once

OPTIONS = {  # of Inductor. On a CPU: less work per call, small loops in one thread; on a GPU: fewer kernels
    'cpu': {'size_asserts': False, 'cpp.min_chunk_size': 16384}, 'cuda': {'size_asserts': False, 'combo_kernels': True}}


@outside_graphs
def runs_on(device):
    """Return True on a GPU with Triton, or a CPU with a C++ compiler (without one, warn once)."""
    if device.type == 'cuda':
        return triton is not None
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')
    if device.type == 'cpu' and not shutil.which(compiler):
        warn_once(f'Recurrences run step by step (slower): no C++ compiler {compiler} (or set CXX)')
    return device.type == 'cpu' and shutil.which(compiler) is not None


def split(tensors, *sizes):
    """Split a list of tensors into lists of these sizes, and the rest."""
    rest = iter(tensors)
    return [*([*itertools.islice(rest, size)] for size in sizes), [*rest]]


class Recurrence:
    """The graphs of a step for one shape of arguments.

    constants: what all tokens read: parameters, see `Step.parameters`, then the first state
    x: arguments of the step, then, if `resets`, the carry mask
    dtype: of products on a GPU; None: that of the weights
    full_length: S of the first segment of a scan; set by `begin_scan`
    """

    def __init__(self, module, step, x, state, resets, dtype):
        self.step, self.resets, self.dtype = products.Step(step, module, [*x, *state]), resets, dtype
        self.sizes = len(self.step.groups), len(self.step.groups), len(self.step.plain)  # of constants
        self.compiled, self.cuda_graphs, self.on_gpu = {}, {}, products.on_gpu(x[0])
        self.fixed = self.loaded = None  # see `at_fixed_addresses`

    def begin_scan(self, named, first, full_length):
        """Return an id of the scan, and its constants. named: {name: parameter}; first: a state."""
        self.step.named, self.full_length = named, full_length
        return object(), [*itertools.chain(*self.step.parameters()), *first]

    # ---- one token: tensors are (B, ...) ----

    def run(self, constants, x, state, known=None):
        """Return the state after a token, the inputs y of products, and their values z."""
        weights, biases, plain, first = split(constants, *self.sizes)
        if self.resets:  # to the first state, where the carry mask is False
            *x, carry = x
            state = [torch.where(carry.view(-1, *[1] * (s.dim() - 1)) != 0, s, f) for s, f in zip(state, first)]
        new, y, z = self.step.run(weights, biases, plain, [*x, *state], known)
        if isinstance(new, torch.Tensor) or [a.shape for a in new] != [s.shape for s in state]:
            raise ValueError('a step must return the new state: a tuple of tensors like those it was given')
        return [a.to(s.dtype).contiguous() for a, s in zip(new, state)], y, z

    def forward(self, constants, x, state):
        """Return the state after a token, then z."""
        state, _, z = self.run(constants, x, state)
        return *state, *z

    def rebuild(self, constants, x, state, z):
        """Return the state after a token."""
        return self.run(constants, x, state, z)[0]

    def backward(self, constants, x, state, z, grad, grad_state, totals):
        """Return the gradient of the state before a token, then totals, dx, dz and y.

        grad, grad_state: gradients of the output, and of the state after the token. totals: sums of
        the gradients of plain parameters.
        """
        weights, biases, plain, first = split(constants, *self.sizes)
        z, op_results = split(z, len(weights))
        with torch.enable_grad():  # of leaves, for autograd
            plain, x, state, z = ([a.detach().requires_grad_() for a in part] for part in (plain, x, state, z))
            after, y, _ = self.run([*weights, *biases, *plain, *first], x, state, [*z, *op_results])
            grads = [grad_state[0] + grad[0], *grad_state[1:]]
            outputs = [a for a in after if a.requires_grad]
            output_grads = [g for a, g in zip(after, grads) if a.requires_grad]
            found = torch.autograd.grad(outputs, [*state, *plain, *x, *z], output_grads, materialize_grads=True)
        grad_state, of_plain, others = split([g.contiguous() for g in found], len(state), len(plain))
        return *grad_state, *(total + g for total, g in zip(totals, of_plain)), *others, *y

    def call(self, function, *parts):
        """Call forward, rebuild or backward. The first call traces it in Python and compiles it."""
        if function not in self.compiled:
            tensors, spec = tree_flatten(parts)
            examples = [torch.empty_like(a) for a in tensors]  # make_fx would take a tensor given twice for one input
            graph = make_fx(lambda *a: function(*tree_unflatten(a, spec)), tracing_mode='fake')(*examples)
            fake = [node.meta['val'] for node in graph.graph.find_nodes(op='placeholder')]  # Inductor caches these
            self.compiled[function] = torch._inductor.compile(graph, fake, options=OPTIONS[tensors[0].device.type])
        return self.compiled[function](*(a for part in parts for a in part))

    # ---- a segment: x, z and grad are (S, B, ...) ----

    def forward_segment(self, constants, x, state):
        """Return the state after S tokens, the output, and z."""
        results = []
        for x_t in zip(*(a.unbind() for a in x)):
            state, z = split(self.call(self.forward, constants, x_t, state), len(state))
            results.append((state[0], *z))
        out, *z = map(torch.stack, zip(*results))
        return state, out, z

    def backward_segment(self, constants, x, state, z, grad, grad_state):
        """Return gradients of the state before S tokens, of plain parameters, then dx, dz and y."""
        tokens = [split(token, len(x), 1) for token in zip(*(a.unbind() for a in [*x, grad, *z]))]
        states, totals, results = [state], [torch.zeros_like(p) for p in split(constants, *self.sizes)[2]], []
        for x_t, _, z_t in tokens[:-1]:
            states.append(self.call(self.rebuild, constants, x_t, states[-1], z_t))
        for x_t, grad_t, z_t in reversed(tokens):
            found = self.call(self.backward, constants, x_t, states.pop(), z_t, grad_t, grad_state, totals)
            grad_state, totals, others = split(found, len(state), len(totals))
            results.append(others)
        dx, dz, y = split(map(torch.stack, zip(*reversed(results))), len(x), len(self.step.groups))  # (S, B, ...)
        return grad_state, totals, dx, dz, y

    def segment(self, function, scan_id, constants, x, *others):
        """Call forward_segment or backward_segment, on a GPU as a CUDA graph if S = full_length."""
        inputs = x, *others
        with torch.autocast(x[0].device.type, enabled=False), torch.cuda.device_of(x[0]):
            if self.on_gpu:
                constants = self.at_fixed_addresses(constants, scan_id)
            if not self.on_gpu or len(x[0]) != self.full_length:
                return function(constants, *inputs)
            key = function, len(x[0])
            if key not in self.cuda_graphs:
                self.cuda_graphs[key] = _CudaGraph(functools.partial(function, constants), inputs)
            return self.cuda_graphs[key].replay(inputs)

    def at_fixed_addresses(self, constants, scan_id):
        """Return the tensors that CUDA graphs read. They hold a scan's constants."""
        if self.fixed is None:
            n = 2 * len(self.step.groups)  # weights and biases of products
            self.fixed = [torch.empty_like(c, dtype=self.dtype if i < n else None) for i, c in enumerate(constants)]
        if self.loaded is not scan_id:  # another scan may run between a scan's forward and backward pass
            for own, c in zip(self.fixed, constants):
                own.copy_(c)
        self.loaded = scan_id
        return self.fixed


class _CudaGraph:
    """A function of lists of tensors as a CUDA graph."""

    def __init__(self, function, inputs):
        self.inputs, self.graph = tree_map(torch.clone, inputs), torch.cuda.CUDAGraph()
        function(*self.inputs)  # compiles, which cannot be recorded
        with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):  # NCCL's thread may run
            self.results = function(*self.inputs)

    def replay(self, inputs):
        """Return copies of the results: the next replay overwrites them."""
        for own, a in zip(tree_leaves(self.inputs), tree_leaves(inputs)):
            own.copy_(a)
        self.graph.replay()
        return tree_map(torch.clone, self.results)


class _Segment(torch.autograd.Function):
    """S tokens. r: a Recurrence; tensors: x, state, then constants. Returns output, then state."""

    @staticmethod
    def forward(ctx, r, scan_id, n_x, n_state, *tensors):
        x, state, constants = split(tensors, n_x, n_state)
        after, out, z = r.segment(r.forward_segment, scan_id, constants, x, state)
        ctx.save_for_backward(*tensors, *z)
        ctx.others = r, scan_id, (n_x, n_state, len(constants))
        return out, *after

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *grad_state):
        r, scan_id, sizes = ctx.others
        x, state, constants, z = split(ctx.saved_tensors, *sizes)
        grad_state, of_plain, dx, dz, y = r.segment(r.backward_segment, scan_id, constants, x, state, z,
                                                    grad.contiguous(), [*grad_state])
        dz, y = ([a.flatten(0, 1) for a in part] for part in (dz, y))
        of_weights = [a.T @ b for a, b in zip(dz, y)]
        of_biases = [a.sum(0, dtype=b.dtype) for a, b in zip(dz, constants[len(dz):])]
        return *[None] * 4, *dx, *grad_state, *of_weights, *of_biases, *of_plain, *[None] * len(state)


@outside_graphs
def scan(module, step, x, first, carry_mask=None, segment_len=32, bptt_len=None):
    """Return the first tensor of the state after each token, (B, T, ...).

    step: a method that reads parameters of module and no buffers; x: list of (B, T, ...); first: a
    constant state, before token 0 and where carry_mask (B, T) is False; bptt_len: gradients stop at
    multiples of this many tokens, best a multiple of segment_len. Products have the weights' dtype,
    on a GPU that of autocast; all else is fp32 or wider.
    """
    x, first = ([at_least_fp32(a) for a in part] for part in (x, first))  # masks and integers, too
    state = first = [s.detach().contiguous() for s in first]
    T, kind, needs_grad = x[0].shape[1], x[0].device.type, torch.is_grad_enabled()
    is_narrow = products.on_gpu(x[0]) and torch.is_autocast_enabled(kind) and first[0].dtype == torch.float32
    dtype = torch.get_autocast_dtype(kind) if is_narrow else None
    named = dict(module.named_parameters())  # looked up here, because FSDP exchanges parameters
    arguments = [a[:, 0] for a in x], first
    shapes = [(name, a.shape, a.dtype) for name, a in [*enumerate(tree_leaves(arguments)), *named.items()]]
    # a new batch size is compiled anew. Old ones are kept, on a GPU with a copy of the parameters
    key = step, module.training, carry_mask is None, dtype, x[0].device, *shapes
    recurrences = module.__dict__.setdefault('_recurrences', NotCopied())  # graphs cannot be copied
    with torch.autocast(kind, enabled=False), torch.inference_mode(False), torch.set_grad_enabled(needs_grad):
        if key not in recurrences:  # not in inference mode: training may use what evaluation has made
            recurrences[key] = Recurrence(module, step, *arguments, carry_mask is not None, dtype)
        if carry_mask is not None:
            x.append(at_least_fp32(carry_mask))
        starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len or T)})
        lengths = [b - a for a, b in zip(starts, [*starts[1:], T])]
        r, outs = recurrences[key], []
        scan_id, constants = r.begin_scan(named, first, lengths[0])
        for start, *x_part in zip(starts, *(a.transpose(0, 1).contiguous().split(lengths) for a in x)):
            if bptt_len and start % bptt_len == 0:
                state = [s.detach() for s in state]
            out, *state = _Segment.apply(r, scan_id, len(x), len(first), *x_part, *state, *constants)
            outs.append(out)
        return torch.cat(outs).transpose(0, 1)
