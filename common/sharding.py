"""FSDP: sharding a model's weights, gradients and moments, and sharded checkpoints.

docs/scale.md explains which weights are gathered when. A model that reads a block's weights
without calling it must set `shard_blocks = False`. Checkpoints load on any number of processes.
"""
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.parallel import world

# ---- the model ----

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


# ---- checkpoints ----

def save_shards(folder: Path, tensors: dict) -> None:
    """Write this process's shards to a folder. Collective; on failure, all raise OSError."""
    file_numbers = {key: 2 if '/' in key else 1 for key in tensors}
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), file_numbers, save_distributed=True)
    try:
        checkpoint.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # a BaseException
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise OSError(f'process {failed}: {cause}')


def tensor_metadata(path: Path) -> dict[str, torch.Tensor]:
    """Return {name: meta tensor} for a folder's safetensors files, sharded or not."""
    found = checkpoint.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device='meta')
            for name, tensor in found.items()}


def target_tensors(own: dict, tensors: dict) -> dict:
    """Return {name: tensor to load into}: the model's `own` tensors, and moments sharded alike."""
    return {name: own[name].detach() if name in own else torch.zeros(()) if tensor.dim() == 0
            else torch.zeros_like(own[name.partition('/')[2]], dtype=tensor.dtype) for name, tensor in tensors.items()}


def load_in_place(tensors: dict, path: Path) -> None:
    """Load tensors in place from a folder's safetensors files; for sharded tensors, the shard."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*torch.distributed is disabled')
        checkpoint.load(tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
