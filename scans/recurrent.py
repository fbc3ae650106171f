"""Recurrences at full speed: compiles a model's own step, as its file writes it.

    step(*x, *state) -> state      one token. All are tensors (B, ...); the first one of the new
                                   state is also the output

`scan` applies a step to T tokens and differentiates it:

    forward   the step, token by token. Kept: the state at the start of each segment, and the values
              z of the products z = W y + b, where W is a parameter (nn.Linear, F.linear)
    rebuild   in the backward pass: the states in a segment, from z and without products
    backward  the gradient of a step, last token first: those of state and x, and the pair (dz, y)
              of each product. Then W's gradient is one large product per segment,
              sum_t dz_t^T y_t, and b's is sum_t dz_t

Each of the three is a graph of one token, traced from the step and compiled by Inductor once per
shape. Products of the same input are one product, a group. The gradients of other parameters, such
as norms' weights, are added token by token. DDP and FSDP see a parameter's gradient once. On a GPU,
the tokens of a segment are recorded as a CUDA graph, and products have the dtype of autocast.

A step must not depend on values of tensors. Its trace freezes what Python computes, so random
numbers have to be among x. A parameter that the step reads gets a gradient, if only of zeros.

An operator with kernels of its own (scans/delta.py) may have the attribute `keeps`. Its last result
is then kept like z, and passed to it as `known` in the backward pass.

    B  batch size    T  positions    S  tokens of a segment    x, state, z, ...: lists of tensors
"""
import functools
import math
import os
import shutil
import sys

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from attn_kernels import at_least_fp32, outside_graphs

from . import triton, warn_once

OPTIONS = {  # of Inductor. On a CPU: less work per call, small loops in one thread; on a GPU: fewer kernels
    'cpu': {'size_asserts': False, 'cpp.min_chunk_size': 16384}, 'cuda': {'size_asserts': False, 'combo_kernels': True}}
PARTS, LANES = 8, 16  # parts of a product's matrix, and a multiple of their rows, for SIMD


@outside_graphs
def runs_on(device):
    """Return True on a GPU with Triton, or a CPU with a C++ compiler (without one, warn once)."""
    if device.type == 'cuda':
        return triton is not None
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')
    if device.type == 'cpu' and not shutil.which(compiler):
        warn_once(f'Recurrences run step by step (slower): no C++ compiler {compiler} (or set CXX)')
    return device.type == 'cpu' and shutil.which(compiler) is not None


def on_gpu(tensor):
    return tensor.is_cuda


# ---- a step's products ----

def weights_of(names, input, weight, bias=None):
    """Return the names of W and b (or None), given F.linear's arguments. names: {id: name}.

    None if W or b is no parameter.
    """
    if id(weight) in names and (bias is None or id(bias) in names):
        return names[id(weight)], None if bias is None else names[id(bias)]
    return None


class _Record(TorchFunctionMode):
    """Records a step's products (names of W and b, input y), other parameters, and kept results."""

    def __init__(self, params):
        super().__init__()
        self.names, self.products, self.inputs, self.plain = {id(p): n for n, p in params.items()}, [], [], {}
        self.op_results = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and (found := weights_of(self.names, *args, **kwargs)):
            self.products.append(found)
            self.inputs.append(args[0])
        else:
            self.plain.update((self.names[id(x)], None) for x in tree_leaves((args, kwargs)) if id(x) in self.names)
        results = func(*args, **kwargs)
        if hasattr(func, 'keeps'):
            self.op_results.append(results[-1])
        return results


def product(y, w):
    """Return y W^T, (B, n). y: (B, m); w: (n, m).

    On a CPU, a batch of products with parts of W, which threads share better than one of few rows.
    """
    if on_gpu(y):
        return y @ w.T
    parts = math.gcd(PARTS, len(w) // LANES) if len(w) % LANES == 0 else 1
    return torch.bmm(y.expand(parts, *y.shape), w.unflatten(0, (parts, -1)).mT).transpose(0, 1).flatten(1)


@torch.library.custom_op(f'{__name__.replace(".", "_")}::product_into', mutates_args=('z',))
def product_into(z: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> None:
    """Write y W^T + b to z. Inductor would copy the product to z, in another kernel."""
    torch.addmm(b, y, w.T, out=z)


class _KnownProduct(torch.autograd.Function):
    """The product W y + b with a known value z, which gets the gradient that is paired with y."""

    @staticmethod
    def forward(ctx, y, w, z):
        ctx.save_for_backward(w)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, dz):
        return product(dz, ctx.saved_tensors[0].T), None, dz


class _Compute(TorchFunctionMode):
    """Computes the products of a step group by group and writes them to z, or takes them from z.

    names: {id of a parameter: its name}; plain: {name: tensor in its place}. Then y and z are the
    inputs and values of the groups.
    """

    def __init__(self, columns_of, weights, biases, names, plain, z, known):
        super().__init__()
        self.columns_of, self.weights, self.biases, self.known = iter(columns_of), weights, biases, known
        self.names, self.plain, self.y, self.z = names, plain, [None] * len(weights), [*z[:len(weights)]]
        self.op_results = iter(z[len(weights):])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and weights_of(self.names, *args, **kwargs):
            return self.product_of(args[0])
        args, kwargs = tree_map(lambda x: self.plain.get(self.names.get(id(x)), x), (args, kwargs))
        return self.call_operator(func, args, kwargs) if hasattr(func, 'keeps') else func(*args, **kwargs)

    def product_of(self, input):
        """Return the next product of the step: columns of its group's, computed at first use."""
        i, columns = next(self.columns_of)
        if self.y[i] is None:
            w, b, z = self.weights[i], self.biases[i], self.z[i]
            y = input.flatten(0, -2).to(w.dtype)
            self.y[i] = y.detach()
            if self.known:
                self.z[i] = _KnownProduct.apply(y, w, z)
            elif on_gpu(y):
                product_into(z, y, w, b)
            else:
                z.copy_(product(y, w) + b)
        return self.z[i][:, columns].unflatten(0, input.shape[:-1])

    def call_operator(self, func, args, kwargs):
        """Call an operator that `keeps` its last result: store that, or give it as known."""
        room = next(self.op_results)
        if self.known:
            return func(*args, **kwargs, known=room)
        results = func(*args, **kwargs)
        return [*results[:-1], room.copy_(results[-1])]


def number_values(graph):
    """Return {node: number}, equal for nodes that compute the same: twice norm(x), for example."""
    numbers, seen = {}, {}
    for node in graph.nodes:
        of_args = torch.fx.node.map_arg((node.args, node.kwargs), numbers.get)
        key = f'{node.target}{of_args}' if node.op == 'call_function' else f'{node.op} {node.target}'
        numbers[node] = seen.setdefault(key, f'%{len(seen)}')
    return numbers


# ---- graphs of one token ----

class Recurrence:
    """A step for one shape of arguments. Its methods take lists of tensors (B, ...) or (S, B, ...).

    params: what `merge` returns; reset: [] or [carry_mask (B,), *first state], see `scan`

    groups: lists of (name of W, name of b or None), for the products of one input
    rows: of each group's input, per sequence: more than 1 if it is (B, heads, m)
    columns_of: for each product of the step, in order, its group's index, and its columns there
    plain: names of the parameters that other functions use
    op_results: a tensor like that of each operator with `keeps`
    """

    def __init__(self, step, named, arguments, dtype=None):
        """Trace the step, and group its products by their input. named: {name: parameter}.

        dtype: of the products, on a GPU; None: that of the weights.
        """
        self.step, self.named, self.dtype, self.on_gpu = step, named, dtype, on_gpu(arguments[0])
        self.compiled, self.cuda_graphs, self.fixed, record = {}, {}, None, _Record(named)

        def inputs(*arguments):
            with record:
                step(*arguments)
            return record.inputs

        graph = make_fx(inputs)(*arguments).graph
        numbers, groups, rows, self.columns_of = number_values(graph), {}, {}, []
        for (w, b), y in zip(record.products, graph.output_node().args[0]):
            group = groups.setdefault(numbers[y], [])
            rows[numbers[y]] = math.prod(y.meta['val'].shape[1:-1])
            start = sum(len(named[name]) for name, _ in group)
            self.columns_of.append((list(groups).index(numbers[y]), slice(start, start + len(named[w]))))
            group.append((w, b))
        self.groups, self.rows, self.plain = [*groups.values()], [*rows.values()], [*record.plain]
        self.op_results = [torch.empty_like(a) for a in record.op_results]

    def merge(self):
        """Return the groups' weights, the groups' biases, and other parameters."""
        def bias(w, b):
            return self.named[w].new_zeros(len(self.named[w])) if b is None else self.named[b]

        return [*(torch.cat([self.named[w] for w, _ in group]) for group in self.groups),
                *(torch.cat([bias(*pair) for pair in group]) for group in self.groups),
                *(self.named[name] for name in self.plain)]

    def at_fixed_addresses(self, params):
        """Return params; on a GPU at fixed addresses, for CUDA graphs, and the groups' in dtype."""
        if not self.on_gpu:
            return params
        if self.fixed is None:
            n = 2 * len(self.groups)
            with torch.inference_mode(False):
                self.fixed = [torch.empty_like(p, dtype=self.dtype if i < n else None) for i, p in enumerate(params)]
        for own, p in zip(self.fixed, params):
            own.copy_(p)
        return self.fixed

    def run(self, params, x, reset, state, z, known=True):
        """Return the state after a token, and its products: in z if known, else written to z."""
        if reset:  # the rows whose carry_mask is False
            carry, *first = reset
            state = [torch.where(carry.view(-1, *[1] * (s.dim() - 1)), s, f) for s, f in zip(state, first)]
        n, names = len(self.groups), {id(p): name for name, p in self.named.items()}
        plain = dict(zip(self.plain, params[2 * n:]))
        with _Compute(self.columns_of, params[:n], params[n:2 * n], names, plain, z, known) as products:
            new = self.step(*x, *state)
        if isinstance(new, torch.Tensor) or [a.shape for a in new] != [s.shape for s in state]:
            raise ValueError('a step must return the new state: a tuple of tensors like those it was given')
        return [a.to(s.dtype).contiguous() for a, s in zip(new, state)], products

    def forward(self, params, x, reset, state, out, z):
        """Return the state after a token. Fills out (its first tensor) and z."""
        state, _ = self.run(params, x, reset, state, z, known=False)
        out[0].copy_(state[0])
        return state

    def rebuild(self, params, x, reset, state, z):
        """Return the state after a token."""
        return self.run(params, x, reset, state, z)[0]

    def backward(self, params, x, reset, state, z, grad, grad_state, totals, dx, dz, y):
        """Return the gradient of the state before a token.

        grad, grad_state: gradients of out, and of the state after the token. Fills dx, dz and y.
        Adds to totals, the gradients of other parameters than the groups'.
        """
        n = len(self.groups)
        z, op_results, weights, plain = z[:n], z[n:], params[:2 * n], params[2 * n:]
        with torch.enable_grad():
            plain, x, state, z = ([a.detach().requires_grad_() for a in part] for part in (plain, x, state, z))
            after, products = self.run([*weights, *plain], x, reset, state, [*z, *op_results])
            grads = [(a, g) for a, g in zip(after, [grad_state[0] + grad[0], *grad_state[1:]]) if a.requires_grad]
            found = torch.autograd.grad([a for a, _ in grads], [*state, *plain, *x, *z], [g for _, g in grads],
                                        materialize_grads=True)
        i, j = len(state), len(state) + len(plain)
        for total, g in zip(totals, found[i:j]):
            total.add_(g)
        for room, value in zip([*dx, *dz, *y], [*found[j:], *products.y]):
            room.copy_(value)
        given = [id(g) for g in grad_state]  # cloned: a CUDA graph that returns an input would overwrite it
        return [g.clone() if id(g) in given else g.contiguous() for g in found[:i]]

    @torch.no_grad()
    def call(self, function, *parts):
        """Call forward, rebuild or backward. The first call traces it in Python and compiles it."""
        tensors = [a for part in parts for a in part]
        if function.__name__ not in self.compiled:
            def flat(*tensors):
                rest = iter(tensors)
                return function(*([next(rest) for _ in part] for part in parts))

            examples = [torch.empty_like(a) for a in tensors]  # make_fx would take a tensor given twice for one input
            graph = make_fx(flat, tracing_mode='fake')(*examples)
            fake = [node.meta['val'] for node in graph.graph.find_nodes(op='placeholder')]  # Inductor caches these
            options = OPTIONS[tensors[0].device.type]
            self.compiled[function.__name__] = torch._inductor.compile(graph, fake, options=options)
        return self.compiled[function.__name__](*tensors)

    # ---- the tokens of a segment ----

    def forward_segment(self, params, x, mask, reset_to, state):
        """Return the state after S tokens, the outputs, and z."""
        S, B = x[0].shape[:2]
        out = x[0].new_empty(S, *state[0].shape)
        z = [w.new_empty(S, B * n, len(w)) for w, n in zip(params, self.rows)]  # params start with the groups' weights
        z += [a.new_empty(S, *a.shape) for a in self.op_results]
        for x_t, mask_t, *rooms in _tokens(S, x, mask, [out], z):
            state = self.call(self.forward, params, x_t, [*mask_t, *reset_to], state, *rooms)
        return state, out, z

    def backward_segment(self, params, x, mask, reset_to, state, z, grad, grad_state, totals):
        """Return the gradient of the state before S tokens, totals, dx, dz, and y."""
        dx, dz = [torch.empty_like(a) for a in x], [torch.empty_like(v) for v in z[:len(self.groups)]]
        y = [v.new_empty(*v.shape[:2], w.shape[1]) for v, w in zip(dz, params)]
        tokens, chain = _tokens(len(grad), x, mask, z, [grad], dx, dz, y), [state]
        for x_t, mask_t, z_t, *_ in tokens[:-1]:
            chain.append(self.call(self.rebuild, params, x_t, [*mask_t, *reset_to], chain[-1], z_t))
        for x_t, mask_t, z_t, grad_t, *rooms in reversed(tokens):
            grad_state = self.call(self.backward, params, x_t, [*mask_t, *reset_to], chain.pop(), z_t, grad_t,
                                   grad_state, totals, *rooms)
        return grad_state, totals, dx, dz, y

    def segment(self, function, params, is_usual, *inputs):
        """Call one of both, on a GPU as a CUDA graph if is_usual: as long as the first segment."""
        with torch.autocast(inputs[0][0].device.type, enabled=False):
            if not is_usual or not self.on_gpu:
                return function(params, *inputs)
            key = function.__name__, len(inputs[0][0])
            if key not in self.cuda_graphs:
                with torch.inference_mode(False), torch.no_grad():  # training may use evaluation's graph
                    self.cuda_graphs[key] = _CudaGraph(functools.partial(function, params), inputs)
            return self.cuda_graphs[key].replay(inputs)


def _tokens(S, *parts):
    """Split lists of tensors (S, ...): 2, [a, b], [] -> [([a0, b0], []), ([a1, b1], [])]."""
    parts = [[a.unbind() for a in part] for part in parts]
    return [tuple([a[t] for a in part] for part in parts) for t in range(S)]


class _CudaGraph:
    """A function of lists of tensors as a CUDA graph. A replay overwrites the last results."""

    def __init__(self, function, inputs):
        self.inputs, self.graph = tree_map(torch.clone, inputs), torch.cuda.CUDAGraph()
        function(*self.inputs)  # compiles, which cannot be recorded
        with torch.cuda.graph(self.graph, capture_error_mode='thread_local'):  # NCCL's thread may run
            self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, a in zip(tree_leaves(self.inputs), tree_leaves(inputs)):
            own.copy_(a)
        self.graph.replay()
        return self.results


# ---- all tokens ----

class _Scan(torch.autograd.Function):
    """See `scan`. segments: [(start, end, True if gradients stop there)]; tensors: x, params."""

    @staticmethod
    def forward(ctx, r, segments, first, mask, reset_to, needs_grad, n_x, *tensors):
        x, params = [a.transpose(0, 1).contiguous() for a in tensors[:n_x]], tensors[n_x:]
        fixed, state, saved = r.at_fixed_addresses(params), first, []
        out = x[0].new_empty(len(x[0]), *first[0].shape)
        for a, b, _ in segments:
            inputs = [v[a:b] for v in x], [v[a:b] for v in mask], reset_to, state
            after, part, z = r.segment(r.forward_segment, fixed, b - a == segments[0][1], *inputs)
            out[a:b] = part
            if r.on_gpu:  # the next replay overwrites these
                after, z = tree_map(torch.clone, (after, z))
            if needs_grad:
                saved += state, z
            state = after
        saved = [x, params, mask, reset_to, *saved]
        ctx.save_for_backward(*(v for part in saved for v in part))
        ctx.others = r, segments, [*map(len, saved)]
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (r, segments, sizes), tensors = ctx.others, iter(ctx.saved_tensors)
        x, params, mask, reset_to, *saved = ([next(tensors) for _ in range(n)] for n in sizes)
        n, fixed, grad = len(r.groups), r.at_fixed_addresses(params), grad.transpose(0, 1).contiguous()
        dx, totals = [torch.empty_like(a) for a in x], [torch.zeros_like(p) for p in params]
        plain = totals[2 * n:]
        for (a, b, stops), state, z in reversed([*zip(segments, saved[::2], saved[1::2])]):
            if stops:
                grad_state = [torch.zeros_like(s) for s in state]
            inputs = [v[a:b] for v in x], [v[a:b] for v in mask], reset_to, state, z, grad[a:b], grad_state, plain
            grad_state, plain, parts, dz, y = r.segment(r.backward_segment, fixed, b - a == segments[0][1], *inputs)
            for room, part in zip(dx, parts):
                room[a:b] = part
            for dw, db, of_z, of_y in zip(totals, totals[n:], dz, y):
                of_z, of_y = of_z.flatten(0, 1), of_y.flatten(0, 1)
                if of_z.dtype == dw.dtype:
                    dw.addmm_(of_z.T, of_y)
                else:
                    dw.add_(of_z.T @ of_y)
                db.add_(of_z.sum(0, dtype=db.dtype))
        return *[None] * 7, *[a.transpose(0, 1) for a in dx], *totals[:2 * n], *[p.clone() for p in plain]


class _Recurrences(dict):
    """A module's recurrences. Graphs cannot be copied or pickled: a copy of the module has none."""

    def __reduce__(self):
        return _Recurrences, ()


@outside_graphs
def scan(module, step, x, first, carry_mask=None, segment_len=32, bptt_len=None):
    """Return the first tensor of the state after each token, (B, T, ...).

    step: a method that reads parameters of module and no buffers; x: list of (B, T, ...); first: a
    constant state, before token 0 and where carry_mask (B, T) is False; bptt_len: gradients stop at
    multiples of this many tokens, best a multiple of segment_len. Products have the weights' dtype,
    on a GPU that of autocast; all else is fp32 or wider.
    """
    x, first = ([at_least_fp32(a) for a in part] for part in (x, first))  # masks and integers, too
    first, T, kind = [s.detach().contiguous() for s in first], x[0].shape[1], x[0].device.type
    arguments = *(a[:, 0].detach().clone() for a in x), *(s.clone() for s in first)
    named = dict(module.named_parameters())  # looked up here, because FSDP exchanges parameters
    is_narrow = on_gpu(x[0]) and torch.is_autocast_enabled(kind) and first[0].dtype == torch.float32
    dtype = torch.get_autocast_dtype(kind) if is_narrow else None
    # a new batch size is compiled anew. Old ones are kept, on a GPU with a copy of the parameters
    key = (step.__code__, id(step.__self__), module.training, carry_mask is None, dtype, x[0].device,
           *((name, a.shape, a.dtype) for name, a in [*enumerate(arguments), *named.items()]))
    recurrences = module.__dict__.setdefault('_recurrences', _Recurrences())
    with torch.autocast(kind, enabled=False):
        r = recurrences[key] = recurrences.get(key) or Recurrence(step, named, arguments, dtype)
        r.step, r.named = step, named
        starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len or T)})
        segments = [(a, b, b == T or bptt_len and b % bptt_len == 0) for a, b in zip(starts, [*starts[1:], T])]
        mask, reset_to = ([], []) if carry_mask is None else ([carry_mask.T.contiguous()], first)
        return _Scan.apply(r, segments, first, mask, reset_to, torch.is_grad_enabled(), len(x), *x, *r.merge())
