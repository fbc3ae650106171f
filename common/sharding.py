"""FSDP: sharding a model's weights, gradients and moments.

docs/scale.md explains which weights are gathered when. A model that reads a block's weights
without calling it must set `shard_blocks = False`.
"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.parallel import world


def gathered_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that FSDP gathers one at a time: the blocks."""
    return list(dict.fromkeys(getattr(model, 'blocks', ()))) if getattr(model, 'shard_blocks', True) else []


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None) -> None:
    """Shard the weights in place. They must be equal on all processes before.

    n_shards consecutive ranks hold one copy of the weights (None: all ranks).
    """
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    for module in (*gathered_modules(model), model):
        fully_shard(module, mesh=mesh)
