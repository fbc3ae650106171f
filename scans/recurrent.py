"""Recurrences at full speed on a CPU: compiles a model's own step, as its file writes it.

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
as norms' weights, are added token by token. DDP and FSDP see a parameter's gradient once.

A step must not depend on values of tensors. Its trace freezes what Python computes, so random
numbers have to be among x. A parameter that the step reads gets a gradient, if only of zeros.

    B  batch size    T  positions    x, state, z, ...: lists of tensors
"""
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

from . import warn_once

OPTIONS = {'size_asserts': False, 'cpp.min_chunk_size': 16384}  # less work per call; small loops in one thread
PARTS, LANES = 8, 16  # parts of a product's matrix, and a multiple of their rows, for SIMD


@outside_graphs
def runs_on(device):
    """Return True on a CPU with a C++ compiler. Says so, once, if there is none."""
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')
    if device.type == 'cpu' and not shutil.which(compiler):
        warn_once(f'Recurrences run step by step (slower): no C++ compiler {compiler} (or set CXX)')
    return device.type == 'cpu' and shutil.which(compiler) is not None


# ---- a step's products ----

def weights_of(names, input, weight, bias=None):
    """Return the names of W and b (or None) in F.linear, if they are parameters. names: by id."""
    if id(weight) in names and (bias is None or id(bias) in names):
        return names[id(weight)], names.get(id(bias))


class _Record(TorchFunctionMode):
    """Records the products of a step (names of W and b, input y), and its other parameters."""

    def __init__(self, params):
        super().__init__()
        self.names, self.products, self.inputs, self.plain = {id(p): n for n, p in params.items()}, [], [], {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and (found := weights_of(self.names, *args, **kwargs)):
            self.products.append(found)
            self.inputs.append(args[0])
        else:
            self.plain.update((self.names[id(x)], None) for x in tree_leaves((args, kwargs)) if id(x) in self.names)
        return func(*args, **kwargs)


def product(y, w):
    """Return y W^T, (B, n). y: (B, m); w: (n, m).

    A batch of products with parts of W, which threads share better than one product of few rows.
    """
    parts = math.gcd(PARTS, len(w) // LANES) if len(w) % LANES == 0 else 1
    return torch.bmm(y.expand(parts, *y.shape), w.unflatten(0, (parts, -1)).mT).transpose(0, 1).flatten(1)


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
    """Computes the products of a step group by group, or takes their known values.

    names: {id of a parameter: its name}; plain: {name: tensor in its place}. Then y and z are the
    inputs and values of the groups.
    """

    def __init__(self, places, weights, biases, names, plain, known):
        super().__init__()
        self.places, self.weights, self.biases, self.known = iter(places), weights, biases, known
        self.names, self.plain, self.y, self.z = names, plain, [None] * len(weights), [None] * len(weights)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.linear or not weights_of(self.names, *args, **kwargs):
            args, kwargs = tree_map(lambda x: self.plain.get(self.names.get(id(x)), x), (args, kwargs))
            return func(*args, **kwargs)
        i, columns = next(self.places)
        if self.z[i] is None:
            w = self.weights[i]
            y = args[0].flatten(0, -2).to(w.dtype)
            self.z[i] = _KnownProduct.apply(y, w, self.known[i]) if self.known else product(y, w) + self.biases[i]
            self.y[i] = y.detach()
        return self.z[i][:, columns].unflatten(0, args[0].shape[:-1])


# ---- graphs of one token ----

class Recurrence:
    """A step for one shape of arguments. Its methods take and return lists of tensors (B, ...).

    params: what `merge` returns; start: [] or [carry_mask (B,), *first state], see `scan`

    groups: lists of (name of W, name of b or None), for the products of one input
    rows: of each group's input, per row of the batch
    places: for each product of the step, in order, its group's index, and its columns there
    plain: names of the parameters that other functions use
    """

    def __init__(self, step, named, arguments):
        """Trace the step, and group its products by their input. named: {name: parameter}."""
        self.step, self.named, self.graphs, record = step, named, {}, _Record(named)

        def inputs(*arguments):
            with record:
                step(*arguments)
            return record.inputs

        graph, numbers, seen = make_fx(inputs)(*arguments).graph, {}, {}
        for node in graph.nodes:  # the same operation on the same values gets the same number
            of_args = torch.fx.node.map_arg((node.args, node.kwargs), numbers.get)
            key = f'{node.target}{of_args}' if node.op == 'call_function' else f'{node.op} {node.target}'
            numbers[node] = seen.setdefault(key, f'%{len(seen)}')
        groups, rows, self.places = {}, {}, []
        for (w, b), y in zip(record.products, graph.output_node().args[0]):
            group = groups.setdefault(numbers[y], [])
            rows[numbers[y]] = math.prod(y.meta['val'].shape[1:-1])
            start = sum(len(named[name]) for name, _ in group)
            self.places.append((list(groups).index(numbers[y]), slice(start, start + len(named[w]))))
            group.append((w, b))
        self.groups, self.rows, self.plain = [*groups.values()], [*rows.values()], [*record.plain]

    def merge(self):
        """Return the groups' weights, the groups' biases, and other parameters."""
        def bias(w, b):
            return self.named[w].new_zeros(len(self.named[w])) if b is None else self.named[b]

        return [*(torch.cat([self.named[w] for w, _ in group]) for group in self.groups),
                *(torch.cat([bias(*pair) for pair in group]) for group in self.groups),
                *(self.named[name] for name in self.plain)]

    def run(self, params, x, start, state, known=()):
        """Return the state after a token, and the step's products."""
        if start:
            state = [torch.where(start[0].view(-1, *[1] * (s.dim() - 1)), s, f) for s, f in zip(state, start[1:])]
        n, names = len(self.groups), {id(p): name for name, p in self.named.items()}
        plain = dict(zip(self.plain, params[2 * n:]))
        with _Compute(self.places, params[:n], params[n:2 * n], names, plain, known) as products:
            new = self.step(*x, *state)
        kinds = [[(s.shape, s.dtype) for s in tensors] for tensors in (state, new)]
        if isinstance(new, torch.Tensor) or kinds[0] != kinds[1]:
            raise ValueError('a step must return the new state: a tuple of tensors like those it was given')
        return [s.contiguous() for s in new], products

    def forward(self, params, x, start, state, out, z):
        """Return the state after a token. Fills out (its first tensor) and z."""
        state, products = self.run(params, x, start, state)
        for room, value in zip([*out, *z], [state[0], *products.z]):
            room.copy_(value)
        return state

    def rebuild(self, params, x, start, state, z):
        """Return the state after a token."""
        return self.run(params, x, start, state, z)[0]

    def backward(self, params, x, start, state, z, grad, grad_state, totals, dx, dz, y):
        """Return the gradient of the state before a token.

        grad, grad_state: gradients of out, and of the state after the token. Fills dx, dz and y.
        Adds to totals, the gradients of other parameters than the groups'.
        """
        n = len(params) - len(totals)
        with torch.enable_grad():
            plain, x, state, z = ([a.detach().requires_grad_() for a in part] for part in (params[n:], x, state, z))
            after, products = self.run([*params[:n], *plain], x, start, state, z)
            grads = [(a, g) for a, g in zip(after, [grad_state[0] + grad[0], *grad_state[1:]]) if a.requires_grad]
            found = iter(torch.autograd.grad([a for a, _ in grads], [*state, *plain, *x, *z], [g for _, g in grads],
                                             materialize_grads=True))
        grad_state = [next(found).contiguous() for _ in state]
        for total in totals:
            total.add_(next(found))
        for room, value in zip([*dx, *dz, *y], [*found, *products.y]):
            room.copy_(value)
        return grad_state

    @torch.no_grad()
    def call(self, function, *parts):
        """Call one of these three. The first call traces it, in plain Python, and compiles it."""
        tensors = [a for part in parts for a in part]
        if function.__name__ not in self.graphs:
            def flat(*tensors):
                rest = iter(tensors)
                return function(*([next(rest) for _ in part] for part in parts))

            examples = [torch.empty_like(a) for a in tensors]  # make_fx would take a tensor given twice for one input
            graph = make_fx(flat, tracing_mode='fake')(*examples)
            fake = [node.meta['val'] for node in graph.graph.find_nodes(op='placeholder')]  # Inductor caches these
            self.graphs[function.__name__] = torch._inductor.compile(graph, fake, options=OPTIONS)
        return self.graphs[function.__name__](*tensors)


def _tokens(tensors, T):
    """Turn a list of tensors (T, ...) into T lists."""
    return [*map(list, zip(*(a.unbind() for a in tensors)))] or [[]] * T


class _Scan(torch.autograd.Function):
    """See `scan`. segments: [(start, end, True if gradients stop there)]; tensors: x, params."""

    @staticmethod
    def forward(ctx, r, segments, mask, first, n_x, *tensors):
        x, params = [a.transpose(0, 1).contiguous() for a in tensors[:n_x]], tensors[n_x:]
        (T, B), states, state = x[0].shape[:2], [first], first
        starts = [[*row, *first] for row in _tokens(mask, T)] if mask else [[]] * T
        out = x[0].new_empty(T, *first[0].shape)
        z = [w.new_empty(T, B * n, len(w)) for w, n in zip(params, r.rows)]
        xs, outs, zs = (_tokens(part, T) for part in (x, [out], z))
        for _, b, _ in segments:
            for t in range(segments[len(states) - 1][0], b):
                state = r.call(r.forward, params, xs[t], starts[t], state, outs[t], zs[t])
            states.append(state)
        ctx.save_for_backward(*x, *params, *z, *(s for state in states[:-1] for s in state))
        ctx.others = r, segments, starts, [len(x), len(params), len(z), *[len(first)] * len(segments)]
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    @torch.autocast('cpu', enabled=False)
    def backward(ctx, grad):
        (r, segments, starts, sizes), saved = ctx.others, iter(ctx.saved_tensors)
        x, params, z, *states = ([next(saved) for _ in range(n)] for n in sizes)
        n = len(z)
        dx, totals = [torch.empty_like(a) for a in x], [torch.zeros_like(p) for p in params]
        T, grad = len(x[0]), grad.transpose(0, 1).contiguous()
        xs, zs, grads, dxs = (_tokens(part, T) for part in (x, z, [grad], dx))
        for (a, b, stops), state in zip(segments[::-1], states[::-1]):
            if stops:
                grad_state = [torch.zeros_like(s) for s in state]
            dz = [v.new_empty(b - a, *v.shape[1:]) for v in z]
            y = [v.new_empty(b - a, v.shape[1], w.shape[1]) for v, w in zip(z, params)]
            rooms, chain = [*zip(_tokens(dz, b - a), _tokens(y, b - a))], [state]
            for t in range(a, b - 1):
                chain.append(r.call(r.rebuild, params, xs[t], starts[t], chain[-1], zs[t]))
            for t in reversed(range(a, b)):
                grad_state = r.call(r.backward, params, xs[t], starts[t], chain.pop(), zs[t], grads[t], grad_state,
                                    totals[2 * n:], dxs[t], *rooms[t - a])
            for dw, db, of_z, of_y in zip(totals, totals[n:], dz, y):
                dw.addmm_(of_z.flatten(0, 1).T, of_y.flatten(0, 1))
                db.add_(of_z.sum((0, 1)))
        return *[None] * 5, *[a.transpose(0, 1) for a in dx], *totals


class _Recurrences(dict):
    """A module's recurrences. Graphs cannot be copied or pickled: a copy of the module has none."""

    def __reduce__(self):
        return _Recurrences, ()


@outside_graphs
def scan(module, step, x, first, carry_mask=None, segment_len=32, bptt_len=None):
    """Return the first tensor of the state after each token, (B, T, ...).

    step: a method that reads parameters of module and no buffers; x: list of (B, T, ...); first: a
    constant state, before token 0 and where carry_mask (B, T) is False; bptt_len: gradients stop at
    multiples of this many tokens. Products have the weights' dtype, all else fp32 or wider, also
    under autocast.
    """
    x, first = ([at_least_fp32(a) if a.is_floating_point() else a for a in part] for part in (x, first))
    first, T = [s.detach().contiguous() for s in first], x[0].shape[1]
    arguments = *(a[:, 0].detach().clone() for a in x), *(s.clone() for s in first)
    named = dict(module.named_parameters())  # looked up here, because FSDP exchanges parameters
    key = (step.__code__, id(step.__self__), module.training, carry_mask is None,
           *((name, a.shape, a.dtype) for name, a in [*enumerate(arguments), *named.items()]))
    recurrences = module.__dict__.setdefault('_recurrences', _Recurrences())
    with torch.autocast('cpu', enabled=False):
        r = recurrences[key] = recurrences.get(key) or Recurrence(step, named, arguments)
        r.step, r.named = step, named
        starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len or T)})
        segments = [(a, b, b == T or bptt_len and b % bptt_len == 0) for a, b in zip(starts, [*starts[1:], T])]
        mask = [] if carry_mask is None else [carry_mask.T.contiguous()]
        return _Scan.apply(r, segments, mask, first, len(x), *x, *r.merge())
