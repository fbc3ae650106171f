"""Several processes: DDP (each holds the whole model) and FSDP (each holds a part of every weight).

What only FSDP needs is in common/sharding.py.
"""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather(value) -> list:
    """Return the value of each process, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def first_given(value):
    """Return the first value over all processes, by rank, that is not None; None if there is none."""
    return next((v for v in all_gather(value) if v is not None), None)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes, in the same tensor."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool) -> bool:
    """Return True if the flag is set on any process."""
    return bool(all_reduce(torch.tensor([flag], dtype=torch.int64)))


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Let rank 0 run the block before all others, so that it can build files that the others then find."""
    if rank() > 0:
        all_gather(None)  # waits for rank 0
    try:
        yield
    finally:
        if rank() == 0:
            all_gather(None)


# ---- the model ----

def is_sharded(model: torch.nn.Module) -> bool:
    return hasattr(model, 'set_requires_gradient_sync')  # added by `fully_shard`


def averaging_gradients(model: torch.nn.Module, compiled: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the compiled model as training calls it: in DistributedDataParallel if processes have copies."""
    if world() == 1 or is_sharded(model):
        return compiled
    return torch.nn.parallel.DistributedDataParallel(compiled, device_ids=[device] if device.type == 'cuda' else None)


def reduce_gradients(model: torch.nn.Module, ddp: torch.nn.Module, on: bool) -> None:
    """Reduce gradients over processes in the next backward pass, or not. ddp: the model as training calls it."""
    if is_sharded(model):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)
    elif isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        ddp.require_backward_grad_sync = on


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """Gather all weights on each process, to run the model without training it. All processes must enter together."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not model, recurse=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor
