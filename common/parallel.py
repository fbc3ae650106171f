"""Several processes: DDP (each holds the whole model) and FSDP (each holds a part of every weight).

FSDP is PyTorch's `fully_shard`. The weights of a group are gathered from all processes before the module is called; at
other times each process keeps only its rows, with their gradients and AdamW's moments:

    each of model.blocks      gathered when the block is called, once forward and once backward, and freed afterwards
    all other weights         embedding, norms, heads, p_psi, ...: gathered from the start of `Model.forward` to the end
                              of its backward, so the model may read them without calling their module

A model whose blocks read each other's weights sets `shard_blocks = False`: all its weights are then in the second
group. So are those of a model without `blocks`.
"""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# torch.distributed.fsdp is imported where it is used: the import takes a second.


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

def gathered_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose weights are gathered one module at a time."""
    return list(dict.fromkeys(getattr(model, 'blocks', ()))) if getattr(model, 'shard_blocks', True) else []


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None) -> None:
    """Shard the weights in place. They must be the same on all processes before.

    Each group of n_shards processes with neighbouring ranks (None: all processes) holds one copy of the weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    for module in (*gathered_modules(model), model):
        fully_shard(module, mesh=mesh)


def is_sharded(model: torch.nn.Module) -> bool:
    return hasattr(model, 'set_requires_gradient_sync')  # added by `fully_shard`


def averaging_gradients(model: torch.nn.Module, compiled: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the compiled model as training calls it: in DistributedDataParallel if processes have copies."""
    if world() == 1 or is_sharded(model):
        return compiled
    return torch.nn.parallel.DistributedDataParallel(compiled, device_ids=[device] if device.type == 'cuda' else None)


def reduce_gradients(model: torch.nn.Module, ddp: torch.nn.Module, on: bool) -> None:
    """Turn the reduction of gradients over processes on or off for the next forward and backward.

    ddp: the model as training calls it.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)
    elif isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        ddp.require_backward_grad_sync = on


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """Gather all weights on each process, to run the model without training it. All processes must enter together.

    Inside, each may do something else.
    """
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
