"""Sharded checkpoints, by torch.distributed.checkpoint in its safetensors format.

Each process writes its shards of the weights and of the moments. Any number of processes reads them.
"""
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException


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
