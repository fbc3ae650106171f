"""The products of a recurrent step, for scans/recurrent.py: computed together, or known.

A product is z = W y + b, where W and b (if any) are parameters (nn.Linear, F.linear). Products of
the same input y are computed as one, a group. `Step` finds them when it is made: it runs the step
once and looks at each call of a PyTorch function. `Step.run` then runs the step with other tensors
in place of the parameters. It computes each group's product once, or takes its known value z.

An operator with kernels of its own (scans/delta.py) may have the attribute `keeps`. Its last result
is then kept like z, and passed to it as `known`.
"""
import math

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

ROWS = 16  # divides the rows of each padded W: for SIMD on a CPU, aligned columns of z on a GPU


def on_gpu(tensor):
    return tensor.is_cuda


def product(y, w, b=None):
    """Return y W^T + b, (B, n). y: (B, m); w: (n, m).

    On a CPU, a batch of products with 8, 4, 2 or 1 parts of W, each of a multiple of ROWS: threads
    share these better than one product with few rows of y.
    """
    if on_gpu(y):
        return F.linear(y, w, b)
    parts = math.gcd(8 * ROWS, len(w)) // ROWS or 1
    z = torch.bmm(y.expand(parts, *y.shape), w.unflatten(0, (parts, -1)).mT).transpose(0, 1).flatten(1)
    return z if b is None else z + b


class _KnownProduct(torch.autograd.Function):
    """The product W y + b, whose value z is known. Gradients: W^T dz of y, and dz of z."""

    @staticmethod
    def forward(ctx, y, w, z):
        ctx.save_for_backward(w)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, dz):
        return product(dz, ctx.saved_tensors[0].T), None, dz


def padded(w):
    """Append zeros to W or b, so that ROWS divides its length."""
    return torch.cat([w, w.new_zeros(-len(w) % ROWS, *w.shape[1:])])


class _Calls(TorchFunctionMode):
    """Calls handle(func, args, kwargs) in place of each function of PyTorch."""

    def __init__(self, handle):
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.handle(func, args, kwargs or {})


class Step:
    """A method of a module, step(*x, *state) -> state.

    named: {name: parameter}
    groups: lists of (name of W, name of b or None), for the products of one input
    places: for each product in the step, in order: its group's index, and its columns there
    plain: names of the parameters that other functions read
    """

    def __init__(self, step, module, arguments):
        self.step, self.named, self.places = step, dict(module.named_parameters()), []
        names, buffers = ({id(a): name for name, a in part} for part in (self.named.items(), module.named_buffers()))
        products = []  # (name of W, name of b or None, y, y's version) of each
        plain, groups = {}, {}  # names as keys, in order of use; {node of y: [(name of W, name of b)]}

        def record(func, args, kwargs):
            reads = args, kwargs
            if func is F.linear and (pair := self.names_of(*args, **kwargs)):
                products.append((*pair, args[0], args[0]._version))
                reads = args[0]
            for a in map(id, tree_leaves(reads)):
                if a in buffers:
                    raise ValueError(f'a step must not read a buffer, here {buffers[a]}: pass it in x, as (B, T, ...)')
                if a in names:
                    plain[names[a]] = True
            return func(*args, **kwargs)

        def inputs_of_products(*arguments):
            with _Calls(record), torch.no_grad():  # else checkpointing would count what autograd saves here
                step(*arguments)
            if any(y._version > version for *_, y, version in products):
                raise ValueError("a step must not change a product's input in place: use y = y + z for y += z")
            return [y for *_, y, _ in products]

        # make_fx gives equal inputs the same node, so nodes name the groups, in order of first use
        graph = make_fx(inputs_of_products)(*map(torch.clone, arguments)).graph
        for y, (w, b, *_) in zip(graph.output_node().args[0], products):
            group = groups.setdefault(y, [])
            start = sum(len(padded(self.named[name])) for name, _ in group)
            self.places.append((list(groups).index(y), slice(start, start + len(self.named[w]))))
            group.append((w, b))
        self.groups, self.plain = [*groups.values()], [*plain]

    def names_of(self, input, weight, bias=None):
        """Return the names of W and b (or None) of F.linear, or None if one is no parameter."""
        names = {id(p): name for name, p in self.named.items()}
        if id(weight) in names and (bias is None or id(bias) in names):
            return names[id(weight)], names.get(id(bias))
        return None

    def parameters(self):
        """Return lists of tensors: the groups' weights, the groups' biases, plain parameters."""
        def bias(w, b):
            return self.named[w].new_zeros(len(self.named[w])) if b is None else self.named[b]

        return ([torch.cat([padded(self.named[w]) for w, _ in group]) for group in self.groups],
                [torch.cat([padded(bias(*pair)) for pair in group]) for group in self.groups],
                [self.named[name] for name in self.plain])

    def run(self, weights, biases, plain, arguments, known=None):
        """Return the new state, the groups' inputs y, and z: computed, or as known."""
        plain = {id(self.named[name]): p for name, p in zip(self.plain, plain)}
        places, ys, zs, op_results = iter(self.places), [], [], []

        def compute(func, args, kwargs):
            if func is F.linear and self.names_of(*args, **kwargs):
                i, columns = next(places)  # the step must make the same products, in the same order
                if i == len(zs):  # the first product of a group
                    y, w = plain.get(id(args[0]), args[0]), weights[i]
                    ys.append(y.reshape(-1, y.shape[-1]).to(w.dtype))
                    zs.append(_KnownProduct.apply(ys[i], w, known[i]) if known else product(ys[i], w, biases[i]))
                return zs[i][:, columns].reshape(*args[0].shape[:-1], -1).clone()  # a step may change it in place
            args, kwargs = tree_map(lambda a: plain.get(id(a), a), (args, kwargs))  # parameters
            if not hasattr(func, 'keeps'):
                return func(*args, **kwargs)
            if known:
                kwargs['known'] = known[len(weights) + len(op_results)]
            results = func(*args, **kwargs)
            op_results.append(results[-1])
            return results

        with _Calls(compute):
            return self.step(*arguments), ys, [*zs, *op_results]
