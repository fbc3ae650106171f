"""Wrap a model for several processes: DDP copies its weights, FSDP shards them.

docs/scale.md explains which weights FSDP gathers when.
"""
import torch

from lm_architectures.machine.parallel import world


def gathered_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that FSDP gathers one at a time: the blocks.

    A model that reads a block's weights without calling it must set `shard_blocks = False`.
    """
    return list(dict.fromkeys(getattr(model, 'blocks', ()))) if getattr(model, 'shard_blocks', True) else []


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None) -> None:
    """Shard the weights, equal on all processes, in place with FSDP.

    n_shards consecutive ranks hold one copy of the weights (None: all ranks).
    """
    from torch.distributed.device_mesh import init_device_mesh  # its import takes a second
    from torch.distributed.fsdp import fully_shard
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    for module in (*gathered_modules(model), model):
        fully_shard(module, mesh=mesh)


def wrap_model(model: torch.nn.Module, compiled: torch.nn.Module, machine, s) -> torch.nn.Module:
    """Return the module to train on several processes. FSDP shards it, or DDP wraps it.

    s has `parallel` and `shard`.
    """
    if s.parallel == 'fsdp':
        shard_model(model, machine.device, s.shard)
        return compiled
    return torch.nn.parallel.DistributedDataParallel(
        compiled, device_ids=[machine.device] if machine.device.type == 'cuda' else None,
        gradient_as_bucket_view=True)  # else 4 bytes per weight more
