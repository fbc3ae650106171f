"""FSDP: a model's weights, gradients and moments in shards, and checkpoints of them.

docs/scale.md says which weights are gathered when. A model whose blocks read each other's weights sets
`shard_blocks = False`. Any number of processes reads a sharded checkpoint.
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
    """Return the modules whose weights are gathered one module at a time."""
    return list(dict.fromkeys(getattr(model, 'blocks', ()))) if getattr(model, 'shard_blocks', True) else []


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None) -> None:
    """Shard the weights in place. They must be the same on all processes before.

    Each group of n_shards processes with neighbouring ranks (None: all processes) holds one copy of the weights.
    """
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    for module in (*gathered_modules(model), model):
        fully_shard(module, mesh=mesh)


# ---- checkpoints ----

def save_shards(folder: Path, tensors: dict) -> None:
    """Write this process's shards to a folder. All processes call it together, and fail together with an OSError."""
    file_numbers = {key: 2 if '/' in key else 1 for key in tensors}
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), file_numbers, save_distributed=True)
    try:
        checkpoint.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # not an Exception
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise OSError(f'process {failed}: {cause}')


def tensors_in_files(path: Path) -> dict[str, torch.Tensor]:
    """Return {name: meta tensor} of the tensors in a folder's safetensors files, sharded or not."""
    found = checkpoint.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device='meta')
            for name, tensor in found.items()}


def places_in(own: dict, tensors: dict) -> dict:
    """Return {name: tensor to read into}: a sharded model's `own` tensors, and new moments with the same shards."""
    return {name: own[name].detach() if name in own else torch.zeros(()) if tensor.dim() == 0
            else torch.zeros_like(own[name.partition('/')[2]]) for name, tensor in tensors.items()}


def fill(tensors: dict, path: Path) -> None:
    """Fill named tensors from a folder's safetensors files. Each process reads its own shard of a sharded tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*torch.distributed is disabled')
        checkpoint.load(tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
