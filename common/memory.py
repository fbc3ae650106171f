"""Estimate the GPU memory of a training step, for dry runs.

The step runs on meta tensors, which have no storage, and the bytes they would take are counted.
"""
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PRODUCTS = {F.linear, F.conv1d, torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors created inside: `live` now, `peak` at most."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {}  # {address of a storage: its bytes}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.nonzero.default and args[0].is_meta:  # its size depends on the values: assume all
            out = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            out = operator(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.live)
        return out

    def _forget(self, address):
        self.live -= self.sizes.pop(address)


class FusedCrossEntropy(torch.autograd.Function):
    """The memory of a compiled loss: it keeps the logits (N, V) and writes their gradient."""

    @staticmethod
    def forward(ctx, logits, targets, reduction):
        ctx.save_for_backward(logits)
        return logits.new_empty(targets.shape if reduction == 'none' else ())

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(ctx.saved_tensors[0]), None, None


class EmulateGPU(_device.DeviceContext):
    """torch.device('meta'), with matrix products in `dtype`, like autocast.

    Attention and cross-entropy are fused, and `.to(torch.float32)` takes no memory: the compiler
    fuses it with what reads the result, which is the loss. It is a DeviceContext because that is
    the only mode in which checkpointing recomputes. PyTorch 2.14 makes a new one from `device`.
    """

    dtype = torch.bfloat16  # `activation_bytes` sets it

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def cast(x):
            return x.to(self.dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
        if function is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*map(cast, args[:3]))[0]
        if function is torch.Tensor.to and args[0].dtype == self.dtype and torch.float32 in args:
            return args[0]
        if function is F.cross_entropy:
            return FusedCrossEntropy.apply(*args[:2], kwargs.get('reduction', 'mean'))
        return super().__torch_function__(function, types, tree_map(cast, args) if function in PRODUCTS else args,
                                          kwargs)


def activation_bytes(model: torch.nn.Module, dtype: torch.dtype, T: int, n_rows: int) -> int:
    """Return peak bytes of forward and backward on n_rows windows, without weights and gradients.

    model: on the meta device. Assumes one document per window. Memory inside our C and Triton
    operators is not counted.
    """
    for p in model.parameters():
        p.grad = torch.empty_like(p)  # gradients exist from the second micro-batch on
    tokens = torch.zeros(n_rows, T, dtype=torch.int64, device='meta')
    with (mock.patch.object(EmulateGPU, 'dtype', dtype), mock.patch.object(_device, 'DeviceContext', EmulateGPU),
          LiveBytes() as live, EmulateGPU('meta')):
        model(tokens, tokens)['loss'].backward()
    return live.peak
