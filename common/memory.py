"""How much memory a training step takes, found without one: its operators run on tensors without storage.

What they take and free is counted as it comes, so any model has its estimate, whatever is in its file.
"""
import math
import weakref
from collections.abc import Callable
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attn_kernels


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that still live: `live` now, `peak` at most."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {}  # address of a storage: its bytes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            # A number that is looked at, and that tensors without storage have not: a first key of attention is 0, no
            # document having ended, and a test is passed.
            return args[0].dtype == torch.bool or 0
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


def give_fake_weights(model: torch.nn.Module) -> None:
    """Replaces the parameters and buffers of a model without storage. Call it under a FakeTensorMode."""
    made = {}  # weights that modules share stay shared

    def fake(tensor):
        if tensor is not None and tensor not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[tensor] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return made.get(tensor)
    for module in model.modules():
        module._parameters = {name: fake(tensor) for name, tensor in module._parameters.items()}
        module._buffers = {name: fake(tensor) for name, tensor in module._buffers.items()}


def step_memory(model: torch.nn.Module, make_optimizer, dtype: torch.dtype, n_rows: int, T: int, on_gpu: bool) -> int:
    """Bytes at the peak of a training step on micro-batches of (n_rows, T) tokens, from the second of them on.

    model: one without storage (`runs.blank_model`), which is of no use afterwards. make_optimizer(model) makes the
    optimizer; products are in dtype. on_gpu: with a GPU's attention kernels; other operators are always those of a CPU.
    The model is as it begins, before any `begin_step`, and documents are as long as the window. Of an operator of our
    own, as GPN's scan, only the results are counted, and not what it holds inside.
    """
    live = LiveBytes()
    # attention takes the way of a GPU's kernels, whose sizes can be told anywhere
    with FakeTensorMode(), live, mock.patch.object(attn_kernels, 'KERNELS_ON_CPU', on_gpu):
        give_fake_weights(model)
        if hasattr(model, 'choose_scan'):  # which would compare numbers
            form = 'loop' if model.config.scan == 'loop' else 'fast'
            model.scan_report = {'scan': form, 'device': 'cpu', 'unused': []}
        optimizer = make_optimizer(model)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()  # makes its moments
        tokens = torch.zeros(n_rows, T, dtype=torch.int64)
        with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
            loss = model(tokens, tokens)['loss']
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return live.peak


def memory_by_rows(make_model: Callable, make_optimizer, dtype: torch.dtype, T: int,
                   on_gpu: bool) -> tuple[float, float]:
    """`step_memory` as a line: (bytes without rows, bytes a row), from two runs of about 2,000 and 4,000 tokens.

    More rows than these take no more logits at a time, so the line is right or somewhat high.
    """
    few = math.ceil(2048 / T)
    low, high = (step_memory(make_model(), make_optimizer, dtype, n, T, on_gpu) for n in (few, 2 * few))
    by_row = (high - low) / few
    return low - few * by_row, by_row
