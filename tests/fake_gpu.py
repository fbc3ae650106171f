"""A GPU that computes nothing: its tensors have a shape, a dtype and the device cuda:0, but no values.

Under `fake_gpu()` the code takes a GPU's branches: `x.is_cuda`, `device.type == 'cuda'`, autocast of cuda, the Triton
kernels, CUDA graphs. Each operator that runs is looked at, and what a GPU would punish is written down as a fault, with
the line of the repository that did it:

    a wait for the device     a value that the host reads, a shape that depends on values, a blocking copy; where the
                              test says `no_wait`
    a tensor of the host      in an operator with tensors of the GPU
    in a graph that is captured besides: any copy from or to the host, and random numbers of a generator

It stands on PyTorch's FakeTensor, which also refuses tensors of two devices. On a PyTorch built for CPUs, C++ knows no
such device as cuda: to C++ the tensors lie on meta, to Python and to the dispatcher on cuda:0. So autocast is on, but
C++ casts nothing: products stay in fp32.
"""
import contextlib
import functools
import sys
from unittest import mock

import torch
import torch._dynamo  # before the patches below
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import attn_kernels
from common import extend_check, int8

aten = torch.ops.aten
GPU = torch.device('cuda', 0)
COPIES = (aten._to_copy.default, aten.copy_.default)
READS = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)
MASKS = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)  # by booleans: a wait for their number


def is_ours(file):
    """Whether a line of this file is the repository's, and not of an environment within it or of this harness."""
    return file.startswith(str(ROOT)) and 'site-packages' not in file and file != __file__


class FakeGPU(FakeTensorMode):
    """The mode that all runs under. faults: sentences; launched: names of Triton kernels; captured: graphs made."""

    def __init__(self):
        super().__init__()
        self.faults, self.launched, self.captured = [], [], 0
        self.waits_allowed, self.is_capturing = True, False

    @contextlib.contextmanager
    def no_wait(self):
        """Here nothing may wait for the device."""
        self.waits_allowed = False
        try:
            yield
        finally:
            self.waits_allowed = True

    @contextlib.contextmanager
    def capture(self, graph, **options):
        """In the place of torch.cuda.graph."""
        self.captured += 1
        self.is_capturing = True
        try:
            with self.no_wait():
                yield
        finally:
            self.is_capturing = False

    def fault(self, what):
        frame = sys._getframe()
        while frame and not is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        place = f' at {frame.f_code.co_filename[len(str(ROOT)) + 1:]}:{frame.f_lineno}' if frame else ''
        self.faults.append(what + (' in a captured graph' if self.is_capturing else '') + place)

    def wait(self, what):
        if not self.waits_allowed:
            self.fault(f'{what} waits for the device')

    def dispatch(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile looks on, nothing runs yet
            return super().dispatch(func, types, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        of_gpu = [x for x in tensors if x.device == GPU]
        target = torch.device(kwargs.get('device') or (tensors[0].device if tensors else 'cpu'))
        if not any(isinstance(x, FakeTensor) for x in tensors) and target.type == 'cpu':
            return func(*args, **kwargs)  # on the host, with values
        if func in COPIES:
            self._check_copy(func, args, kwargs)
        elif of_gpu and len(of_gpu) < len(tensors):
            self.fault(f'{func} is given a tensor of the host beside those of the GPU')
        if self.is_capturing and kwargs.get('generator') is not None:
            self.fault(f'{func} draws from a generator')
        kwargs = {name: value for name, value in kwargs.items() if name != 'generator'}  # without values no matter
        if func in READS:
            if of_gpu:
                self.wait('a value that the host reads')
            return self._answer(args[0])
        if func in MASKS and any(x is not None and x.dtype == torch.bool for x in args[1]):
            if of_gpu:
                self.wait('an index of booleans')
            one = lambda x: x.new_zeros(1, dtype=torch.int64)  # as if one were true
            index = [i for x in args[1] for i in ([x] if x is None or x.dtype != torch.bool else [one(x)] * x.dim())]
            args = (args[0], index, *args[2:])
        without_values = lambda x: x if isinstance(x, FakeTensor) else self.from_tensor(x)
        args, kwargs = tree_map_only(torch.Tensor, without_values, (args, kwargs))
        out = super().dispatch(func, types, args, kwargs)
        if func is aten.any.default:
            out.is_any = True
        return out

    def _check_copy(self, func, args, kwargs):
        source = args[0] if func is aten._to_copy.default else args[1]
        to = kwargs.get('device') or source.device if func is aten._to_copy.default else args[0].device
        if source.device == GPU and torch.device(to).type != 'cpu' or source.device == torch.device(to):
            return
        non_blocking = kwargs.get('non_blocking', False) or len(args) > 2 and args[2]
        if self.is_capturing:
            self.fault(f'{func} copies between host and device')
        elif source.device == GPU:
            self.wait('a copy to the host')
        elif not (non_blocking and getattr(source, 'is_in_pinned_memory', False) and source.is_contiguous()):
            self.wait('a blocking copy from the host')  # of what has gaps there is a copy on the host first, not pinned

    @staticmethod
    def _answer(x):
        """What the host reads: tests are passed, nothing is there yet, numbers are 1."""
        return not getattr(x, 'is_any', False) if x.dtype == torch.bool else 1


def _to_fake_device(normalize, device):
    return GPU if device.type in ('cuda', 'meta') else normalize(device)


def _make_subclass(make, *args, dispatch_device=False, device_for_backend_keys=None, **options):
    """Tensor._make_subclass, which here leaves C++ the device meta."""
    if device_for_backend_keys == GPU:
        dispatch_device = False
    return make(*args, dispatch_device=dispatch_device, device_for_backend_keys=device_for_backend_keys, **options)


def _pin_memory(x):
    x.is_in_pinned_memory = True
    return x


class _Stream:
    def wait_stream(self, other):
        pass


_make_generator = torch.Generator


class _Generator:
    """In the place of torch.Generator: one of the CPU, whatever the device."""

    def __new__(cls, device='cpu'):
        return _make_generator('cpu')


class _Graph:
    def replay(self):
        pass

    def pool(self):
        return 0, 0


class _Launch:
    """In the place of a Triton kernel."""

    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.gpu.launched.append(self.name)
            if any(isinstance(x, torch.Tensor) and x.device != GPU for x in args):
                self.gpu.fault(f'{self.name} is given a tensor of the host')
        return launch


def _kernels():
    """(module, name) of each Triton kernel of the repository."""
    rooms = [attn_kernels, int8, *(attn_kernels.import_scan(name) for name in ('delta_rule', 'gpn'))]
    return [(room, name) for room in rooms for name in vars(room) if name.endswith('_kernel') and name[0] == '_']


def forget_tensors():
    """Clears the caches of the repository that hold tensors."""
    gpn = attn_kernels.import_scan('gpn')
    gpn._constant.cache_clear()
    gpn.forget_graphs()


@functools.cache
def _kernels_of_a_gpu():
    """Operators that a GPU has as one kernel and PyTorch for CPUs, having none for it, would take apart.

    They are told that there is one: it is never called, as tensors have no values.
    """
    library = torch.library.Library('aten', 'IMPL', 'CUDA')
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if (name.startswith('aten::') and has_kernel(name, 'CompositeImplicitAutograd') and has_kernel(name, 'CPU')
                and not has_kernel(name, 'CUDA')):
            library.impl(name.removeprefix('aten::'), lambda *args: None)
    return library


@contextlib.contextmanager
def fake_gpu():
    """Yields the `FakeGPU` that all runs under."""
    gpu = FakeGPU()
    patch = mock.patch.object
    normalize = functools.partial(_to_fake_device, FakeTensor._normalize_fake_device)
    make = functools.partial(_make_subclass, torch.Tensor._make_subclass)
    with contextlib.ExitStack() as patches:
        if not torch.cuda.is_available():
            _kernels_of_a_gpu()
        for module, name in _kernels():
            patches.enter_context(patch(module, name, _Launch(gpu, name)))
        for patched in (
                patch(FakeTensor, '_normalize_fake_device', staticmethod(normalize)),
                patch(FakeTensor, 'is_cuda', property(lambda x: x.device == GPU), create=True),
                patch(torch.Tensor, '_make_subclass', make),
                patch(torch.Tensor, 'pin_memory', _pin_memory),
                patch(torch, 'Generator', _Generator),
                patch(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: False),
                patch(torch.cuda, 'is_bf16_supported', lambda: True),
                patch(torch.cuda, 'set_device', lambda device: None),
                patch(torch.cuda, 'device_of', contextlib.nullcontext),
                patch(torch.cuda, 'Stream', _Stream), patch(torch.cuda, 'current_stream', _Stream),
                patch(torch.cuda, 'stream', contextlib.nullcontext),
                patch(torch.cuda, 'make_graphed_callables', lambda function, inputs: function),
                patch(torch.cuda, 'CUDAGraph', _Graph), patch(torch.cuda, 'graph', gpu.capture),
                patch(extend_check, 'extend_error', lambda model: 0.0)):  # there are no numbers to compare
            patches.enter_context(patched)
        torch._dynamo.reset()
        try:
            with gpu:
                yield gpu
        finally:
            torch._dynamo.reset()
            forget_tensors()
