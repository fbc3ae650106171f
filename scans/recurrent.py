"""Recurrences at full speed on a CPU: compiles a model's own step, as its file writes it.

    step(*x, *state) -> state      one token. All are tensors (B, ...); the first one of the new
                                   state is also the output

`scan` applies a step to T tokens, in segments, and differentiates it:

    forward   the step, token by token. Kept: each segment's first state, and the values z of the
              products z = W y + b, where W is a parameter (nn.Linear, F.linear)
    rebuild   in the backward pass: the states in a segment, from z and without products
    backward  the gradient of a step, last token first: those of state and x, and the pair (dz, y)
              of each product. Then W's gradient is one large product per segment,
              sum_t dz_t^T y_t, and b's is sum_t dz_t

Each of the three is a graph of one token, traced from the step and compiled by Inductor once per
shape. Products of the same input are one product, a group. The gradients of other parameters, such
as norms' weights, are added token by token. All gradients leave through one autograd.Function, so
that DDP and FSDP see each of them once.

A step must not depend on values of tensors. Its trace freezes what Python computes, so random
numbers have to be among x. A parameter that the step reads gets a gradient, if only of zeros.

    B  batch size    T  positions    S  segment length
"""
import functools
import math
import os
import shutil
import sys
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from attn_kernels import outside_graphs

OPTIONS = {'size_asserts': False, 'cpp.min_chunk_size': 16384}  # less work per call; small loops in one thread
PARTS, WIDTH = 8, 16  # of a product's matrix, and a multiple of each part's rows: SIMD lanes


@outside_graphs
@functools.cache
def runs_on(device):
    """Return True on a CPU with a C++ compiler. Says so, once, if there is none."""
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')
    if device.type == 'cpu' and shutil.which(compiler) is None:
        print(f'Recurrences run step by step (slower): there is no C++ compiler {compiler} (or set CXX)',
              file=sys.stderr)
        return False
    return device.type == 'cpu'


# ---- what a step does with parameters ----

@dataclass
class Plan:
    groups: list  # lists of (name of W, name of b or None), for the products of one input
    places: list  # for each product of the step, in order: index of its group, and its columns there
    plain: list  # names of the parameters that other functions use
    rows: list  # of each group's input, per row of the batch

    def names(self):
        return list(dict.fromkeys([*self.plain, *(name for group in self.groups for pair in group for name in pair
                                                  if name is not None)]))


class _Record(TorchFunctionMode):
    """Records the products of a step (names of W and b, input y), and its other parameters."""

    def __init__(self, params):
        super().__init__()
        self.names, self.products, self.inputs, self.plain = {id(p): n for n, p in params.items()}, [], [], {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = [self.names[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self.names]
        if func is F.linear and id(args[1]) in self.names:
            self.products.append((*names, None)[:2])
            self.inputs.append(args[0])
        else:
            self.plain.update(dict.fromkeys(names))
        return func(*args, **kwargs or {})


def make_plan(step, params, arguments):
    """Trace the step, and group its products by their input. params: {name: parameter}."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import
    record = _Record(params)

    def inputs(*arguments):
        with record:
            step(*arguments)
        return record.inputs

    graph, numbers, seen = make_fx(inputs)(*arguments).graph, {}, {}
    for node in graph.nodes:  # the same operation on the same values gets the same number
        of_args = torch.fx.node.map_arg((node.args, node.kwargs), numbers.get)
        key = f'{node.target}{of_args}' if node.op == 'call_function' else f'{node.op} {node.target}'
        numbers[node] = seen.setdefault(key, f'%{len(seen)}')
    groups, places, rows = {}, [], []
    for (w, b), y in zip(record.products, graph.output_node().args[0]):
        if numbers[y] not in groups:
            rows.append(math.prod(y.meta['val'].shape[1:-1]))
        group = groups.setdefault(numbers[y], [])
        start = sum(len(params[name]) for name, _ in group)
        places.append((list(groups).index(numbers[y]), slice(start, start + len(params[w]))))
        group.append((w, b))
    return Plan(list(groups.values()), places, list(record.plain), rows)


# ---- products ----

def product(y, w):
    """Return y W^T, (B, n). y: (B, m); w: (n, m).

    A batch of products with parts of W, which threads share better than one product of few rows.
    """
    parts = math.gcd(PARTS, len(w) // WIDTH) if len(w) % WIDTH == 0 else 1
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
    """Computes a step's products group by group, or takes their known values.

    weights, biases: of the groups. stand_ins: {id of a parameter: tensor}. Then y and z are the
    inputs and values of the groups, (B, ...).
    """

    def __init__(self, places, weights, biases, stand_ins, known):
        super().__init__()
        self.places, self.weights, self.biases, self.known = iter(places), weights, biases, known
        self.stand_ins, self.y, self.z = stand_ins, [None] * len(weights), [None] * len(weights)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear or id(args[1]) not in self.stand_ins:
            args, kwargs = tree_map(lambda x: self.stand_ins.get(id(x), x), (args, kwargs or {}))
            return func(*args, **kwargs)
        (i, columns), shape = next(self.places), args[0].shape[:-1]
        if self.z[i] is None:
            w, y = self.weights[i], args[0].flatten(0, -2)
            self.z[i] = _KnownProduct.apply(y, w, self.known[i]) if self.known else product(y, w) + self.biases[i]
            self.y[i] = y.detach()
        return self.z[i][:, columns].unflatten(0, shape)


# ---- graphs of one token ----

class Recurrence:
    """The graphs of a module's step. Their arguments are lists of tensors (B, ...).

    params: weights and biases of the groups, and other parameters; x, state: of the step; start:
    [] or [carry_mask (B,), *first state], see `scan`.
    """

    def __init__(self):
        self.graphs, self.plan, self.step, self.params = {}, None, None, None

    def run(self, params, x, start, state, known=()):
        """Return the state after a token, and the step's products."""
        if start:
            state = [torch.where(start[0].view(-1, *[1] * (s.dim() - 1)), s, f) for s, f in zip(state, start[1:])]
        n, plan = len(self.plan.groups), self.plan
        plain = dict(zip(plan.plain, params[2 * n:]))
        stand_ins = {id(p): plain.get(name, p) for name, p in self.params.items()}
        with _Compute(plan.places, params[:n], params[n:2 * n], stand_ins, known) as products:
            state = self.step(*x, *state)
        return [s.contiguous() for s in state], products

    def forward(self, params, x, start, state, out, z):
        """Return the state after a token. Fills out (its first tensor) and z."""
        state, products = self.run(params, x, start, state)
        _fill([*out, *z], [state[0], *products.z])
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
            wanted = [*state, *plain, *x, *z]
            found = torch.autograd.grad([a for a, _ in grads], wanted, [g for _, g in grads], allow_unused=True)
        found = iter([torch.zeros_like(a) if g is None else g for a, g in zip(wanted, found)])
        grad_state = [next(found).contiguous() for _ in state]
        for total in totals:
            total.add_(next(found))
        _fill([*dx, *dz, *y], [*found, *products.y])
        return grad_state

    def compiled(self, function, *parts):
        """Return one of these three as a function of all tensors, compiled for such parts."""
        tensors = [a for part in parts for a in part]
        key = function.__name__, *((a.shape, a.dtype) for a in tensors)
        if key not in self.graphs:
            def flat(*tensors):
                rest = iter(tensors)
                return function(*([next(rest) for _ in part] for part in parts))

            self.graphs[key] = compile_function(flat, tensors)
        return self.graphs[key]

    # ---- segments: lists of tensors (S, B, ...) ----

    def segment_forward(self, params, x, mask, first, state, out, z):
        """Return the state after a segment. Fills out and z."""
        run, steps = None, zip(*(_tokens(part, len(x[0])) for part in (x, mask, out, z)))
        for x_t, mask_t, out_t, z_t in steps:
            parts = params, x_t, [*mask_t, *first], state, out_t, z_t
            run = run or self.compiled(self.forward, *parts)
            state = run(*_flat(parts))
        return state

    def segment_backward(self, params, x, mask, first, state, z, grad, grad_state, totals, dx):
        """Return the gradient of the first state. Adds to totals, of params, and fills dx."""
        n, S, run = len(z), len(x[0]), None
        dz, y = [torch.empty_like(a) for a in z], [a.new_empty(*a.shape[:2], w.shape[1]) for a, w in zip(z, params)]
        x, mask, z, grad, *rooms = (_tokens(part, S) for part in (x, mask, z, grad, dx, dz, y))
        states, of_groups, of_others = [state], totals[:2 * n], totals[2 * n:]
        for t in range(S - 1):
            parts = params, x[t], [*mask[t], *first], states[t], z[t]
            run = run or self.compiled(self.rebuild, *parts)
            states.append(run(*_flat(parts)))
        run = None
        for t in reversed(range(S)):
            parts = (params, x[t], [*mask[t], *first], states.pop(), z[t], grad[t], grad_state, of_others,
                     *(part[t] for part in rooms))
            run = run or self.compiled(self.backward, *parts)
            grad_state = run(*_flat(parts))
        for dw, db, a, b in zip(of_groups[:n], of_groups[n:], dz, y):
            a, b = a.flatten(0, 1), b.flatten(0, 1)
            dw.addmm_(a.T, b)
            db.add_(a.sum(0))
        return grad_state


@torch.no_grad()
def compile_function(function, tensors):
    """Trace a function of tensors like these, in plain Python, and compile the graph."""
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx
    examples = [torch.empty_like(a) for a in tensors]  # make_fx would take a tensor given twice for one input
    return torch._inductor.compile(make_fx(function, tracing_mode='fake')(*examples), examples, options=OPTIONS)


def _fill(rooms, values):
    for room, value in zip(rooms, values, strict=True):
        room.copy_(value)


def _flat(parts):
    return [a for part in parts for a in part]


def _tokens(tensors, S):
    """Turn a list of tensors (S, ...) into S lists."""
    return [*map(list, zip(*(a.unbind() for a in tensors)))] or [[]] * S


# ---- all tokens ----

def merge(plan, own):
    """Return weights and biases of the groups, and other parameters. own: {name: parameter}."""
    def cat(group, i):
        return torch.cat([own[pair[0]].new_zeros(len(own[pair[0]])) if pair[i] is None else own[pair[i]]
                          for pair in group])

    return [*(cat(group, 0) for group in plan.groups), *(cat(group, 1) for group in plan.groups),
            *(own[name] for name in plan.plain)]


def split(plan, own, totals):
    """Return {name: gradient}, given the gradients of what `merge` returns."""
    n, grads = len(plan.groups), dict(zip(plan.plain, totals[2 * len(plan.groups):]))
    for group, *of_group in zip(plan.groups, totals, totals[n:]):
        sizes = [len(own[w]) for w, _ in group]
        for pair, *parts in zip(group, *(total.split(sizes) for total in of_group)):
            for name, part in zip(pair, parts):
                if name is not None:
                    grads[name] = grads[name] + part if name in grads else part
    return grads


class _Scan(torch.autograd.Function):
    """See `scan`. tensors: x, then parameters in the order of `Plan.names`."""

    @staticmethod
    def forward(ctx, recurrence, segments, mask, first, n_x, *tensors):
        r, x = recurrence, [a.transpose(0, 1).contiguous() for a in tensors[:n_x]]
        (T, B), state, states = x[0].shape[:2], first, []
        params = merge(r.plan, dict(zip(r.plan.names(), tensors[n_x:])))
        out = first[0].new_empty(T, *first[0].shape)
        z = [w.new_empty(T, B * n, len(w)) for w, n in zip(params, r.plan.rows)]
        for a, b, _ in segments:
            states.append(state)
            state = r.segment_forward(params, *_parts(a, b, x, mask), first if mask else [], state,
                                      *_parts(a, b, [out], z))
        ctx.save_for_backward(*x, *tensors[n_x:])
        ctx.z, ctx.states, ctx.others = z, states, (r, segments, mask, first, n_x)
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        (r, segments, mask, first, n_x), grad = ctx.others, grad.transpose(0, 1).contiguous()
        x, own = ctx.saved_tensors[:n_x], dict(zip(r.plan.names(), ctx.saved_tensors[n_x:]))
        params, dx = merge(r.plan, own), [torch.empty_like(a) for a in x]
        totals = [torch.zeros_like(p) for p in params]
        for (a, b, ends), state in zip(segments[::-1], ctx.states[::-1]):
            if ends:
                grad_state = [torch.zeros_like(s) for s in state]
            grad_state = r.segment_backward(params, *_parts(a, b, x, mask), first if mask else [], state,
                                            *_parts(a, b, ctx.z, [grad]), grad_state, totals, *_parts(a, b, dx))
        grads = split(r.plan, own, totals)
        return *[None] * 5, *[a.transpose(0, 1) for a in dx], *[grads[name] for name in own]


def _parts(a, b, *lists):
    return [[x[a:b] for x in tensors] for tensors in lists]


_recurrences = weakref.WeakKeyDictionary()  # {module: Recurrence}. A graph cannot be copied or pickled with the module


@outside_graphs
def scan(module, step, x, first, carry_mask=None, segment_len=32, bptt_len=None):
    """Return the first tensor of the state after each token, (B, T, ...).

    x: list of tensors (B, T, ...); first: state before token 0, and where carry_mask (B, T) is
    False; bptt_len: gradients stop at multiples of this many tokens. The products have the dtype of
    the weights, also under autocast.
    """
    r = _recurrences.setdefault(module, Recurrence())
    r.step, r.params = step, dict(module.named_parameters())  # looked up here, because FSDP exchanges parameters
    if r.plan is None:
        arguments = [*(a[:, 0].detach() for a in x), *first]
        r.plan = make_plan(step, r.params, [a.clone() for a in arguments])
    T = x[0].shape[1]
    starts = sorted({*range(0, T, segment_len), *range(0, T, bptt_len or T)})
    segments = [(a, b, b == T or bptt_len and b % bptt_len == 0) for a, b in zip(starts, [*starts[1:], T])]
    mask = [] if carry_mask is None else [carry_mask.T.contiguous()]
    with torch.autocast('cpu', enabled=False):
        return _Scan.apply(r, segments, mask, list(first), len(x), *x, *(r.params[name] for name in r.plan.names()))
