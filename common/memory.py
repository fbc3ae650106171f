"""Estimate of the memory of a training step on a GPU, for dry runs.

Weights, gradients and moments are counted from the parameters. For activations, the step runs on meta tensors, which
have no storage, and the bytes that they would take are counted.
"""
import math
import weakref

import torch
import torch.nn.functional as F
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from common.parallel import gathered_modules

PRODUCTS = {F.linear, F.conv1d, torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live tensors that were made inside it: `live` now, `peak` at most."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {}  # address of a storage: its bytes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.nonzero.default and args[0].is_meta:  # no values to tell how many: at most all
            out = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _count(self, storage):
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address):
        self.live -= self.sizes.pop(address)


class AsOnGPU(DeviceContext):  # the only kind of mode that activation checkpointing enters again in the backward pass
    """torch.device('meta'), where tensors take the memory of a GPU: matrix products in `dtype` and fused attention.

    It stands in for autocast, which PyTorch does not have for meta tensors.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__(torch.device('meta'))
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def cast(x):
            return x.to(self.dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
        if function is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*map(cast, args[:3]))
        if function in PRODUCTS:
            args = tree_map(cast, args)
        return super().__torch_function__(function, types, args, kwargs)


class _FusedAttention(torch.autograd.Function):
    """Keeps what fused attention keeps: inputs, output and the log-sum-exp of each query. q, k, v: (B, H, n, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def activation_bytes(model: torch.nn.Module, dtype: torch.dtype, n_rows: int, T: int) -> int:
    """Return the peak bytes of a forward and backward pass besides weights and gradients.

    model: on the meta device (`runs.blank_model`). Windows are taken to be one document. The bytes that our own
    operators in C or Triton hold inside are not counted.
    """
    for p in model.parameters():
        p.grad = torch.empty_like(p)  # as from the second micro-batch on
    tokens = torch.zeros(n_rows, T, dtype=torch.int64, device='meta')
    with LiveBytes() as live, AsOnGPU(dtype):
        model(tokens, tokens)['loss'].backward()
    return live.peak


def bytes_by_rows(model: torch.nn.Module, dtype: torch.dtype, T: int) -> tuple[float, float]:
    """Return `activation_bytes` as a line: (bytes without rows, bytes per row).

    Fitted to micro-batches of about 2,000 and 4,000 tokens. The logits of a chunked loss do not grow beyond those, so
    the line is right or somewhat high for larger ones.
    """
    few = math.ceil(2048 / T)
    low, high = (activation_bytes(model, dtype, n, T) for n in (few, 2 * few))
    per_row = (high - low) / few
    return low - few * per_row, per_row


def held_bytes(model: torch.nn.Module, n_copies: int, n_shards: int, n_one_moment: int) -> float:
    """Return the bytes per process of weights, gradients and two moments in fp32, and of what sharing them takes.

    n_shards: processes that share one copy of the weights, of which n_copies are trained together. n_one_moment:
    parameters with one moment (Muon's). With FSDP, a process also holds the weights outside the blocks with their
    gradients, and the larger of their send buffer and the buffers of the blocks (a block, the prefetched one, its
    gradients, two buffers). With DDP it holds the buckets of gradients. From the code of PyTorch, not measured.
    """
    n_params = sum(p.numel() for p in model.parameters())
    held = 16 * n_params - 4 * n_one_moment
    if n_shards == 1:
        return held + 4 * n_params * (n_copies > 1)
    blocks = [sum(p.numel() for p in module.parameters()) for module in gathered_modules(model)]
    outside = n_params - sum(blocks)
    return held / n_shards + 4 * (2 * outside + max(outside, 5 * max(blocks, default=0)))
