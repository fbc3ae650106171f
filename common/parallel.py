"""One model on several processes: DDP, where each has all of it, and FSDP, where each has a part of every weight.

FSDP is PyTorch's `fully_shard`. A group of weights is gathered from all processes before the module that has it is
called, and the rest of the time each process keeps its rows alone, with their gradients and AdamW's moments:

    each of model.blocks      gathered when the block is called, once forward and once backward, and freed after it
    all other weights         embedding, norms, heads, p_psi, ...: gathered from the start of `Model.forward` to the
                              end of its backward, so a model may read them without calling their module

A model with a fast form of its equations (`choose_scan`) may read its blocks' weights without calling them: all its
weights are in the second group, and so are those of a model that has no `blocks`.
"""
import functools
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
import torch.distributed as dist

from common.files import UserError

# torch.distributed.fsdp and .checkpoint are imported where they are used: they take a second, which one process spares.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def of_all(value) -> list:
    """The value of each process, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def first_of_all(value):
    """The first value of any process that is not None, by rank; None if there is none."""
    return next((v for v in of_all(value) if v is not None), None)


# ---- the model ----

def check_sharding(parallel: str, n_shards: int | None, n_processes: int) -> None:
    """Raises UserError for settings `parallel` and `shard` that so many processes cannot have."""
    if parallel not in ('ddp', 'fsdp'):
        raise UserError(f"parallel is {parallel!r}: expected 'ddp' or 'fsdp'")
    if n_shards and parallel == 'ddp':
        raise UserError(f'shard is {n_shards}, but with parallel = ddp each process has all weights: use '
                        '--parallel=fsdp or --shard=None')
    if n_shards and n_processes > 1 and n_processes % n_shards:
        raise UserError(f'shard is {n_shards}, which does not divide the {n_processes} processes: use a divisor, as '
                        'the number of GPUs of a machine, or --shard=None to share the weights among all')


def gathered_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose weights are gathered when they are called, one after the other. See the top of this file."""
    return [] if hasattr(model, 'choose_scan') else list(dict.fromkeys(getattr(model, 'blocks', ())))


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None) -> None:
    """Leaves each process its part of the weights, in place. The weights are the same on all processes before.

    They are shared by groups of n_shards processes of neighbouring ranks (None: by all), each of which has all of them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    for module in (*gathered_modules(model), model):
        fully_shard(module, mesh=mesh)


def gathered_bytes(model: torch.nn.Module, accumulates: bool) -> tuple[int, int]:
    """What a process of a sharded model holds at most besides its own parts: (bytes in training, in evaluation).

    In training: the weights that are gathered all the time and their gradients; and, at its largest, either what is
    sent of those gradients, or a block and the one gathered ahead, and of one block what is received, its gradients and
    what is sent of them. With accumulates, where gradients of several micro-batches are summed first, those of all
    blocks. In evaluation all weights are gathered. By `fully_shard`'s code, not by a measurement.
    """
    blocks = [sum(p.numel() for p in module.parameters()) for module in gathered_modules(model)]
    n_params = sum(p.numel() for p in model.parameters())
    always = n_params - sum(blocks)
    numbers = 2 * always + max(always, 5 * max(blocks, default=0))
    if accumulates:
        numbers += sum(blocks)
    return 4 * numbers, 4 * n_params


def is_sharded(model: torch.nn.Module) -> bool:
    return hasattr(model, 'set_requires_gradient_sync')  # as what `fully_shard` has made of it


def reduce_gradients(model: torch.nn.Module, ddp: torch.nn.Module, on: bool) -> None:
    """Whether the next forward and backward also sum gradients over the processes: once a step, in the last of them.

    ddp: the model as it is called, which is a DistributedDataParallel around it where that is in use.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)
    elif isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        ddp.require_backward_grad_sync = on


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """All weights on each process, for whatever runs the model without training it. All processes enter together.

    Within, processes need not do the same: none waits for another. A model that is not sharded stays as it is.
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
    """A tensor of which each process may have a part, or a term of a sum, on each of them."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


# ---- files of which each process writes one ----

def write_parts(folder, tensors: dict, file_of: dict) -> Future:
    """Each process writes the parts that it has of named tensors: the Future ends when all have. See `wait_for`.

    The parts are copied to the host before this returns. file_of {tensor name: number of its file, from 1}: the files
    are shard-<rank + 1>-model-<number>-of-<most>.safetensors, each with the place of its parts in its header.
    """
    from torch.distributed import checkpoint
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
    return checkpoint.async_save(tensors, storage_writer=writer, process_group=writers())


def wait_for(written: Future) -> None:
    """Waits for the Future of `write_parts`. Raises OSError with what the first process that failed says."""
    from torch.distributed.checkpoint.api import CheckpointException
    try:
        written.result()
    except CheckpointException as error:  # which is no Exception
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise OSError(f'process {failed}: {cause}')


@functools.cache
def writers() -> dist.ProcessGroup:
    """All processes once more: what they tell each other while they write must not mix with what training sends."""
    return dist.new_group(backend='gloo')


def tensors_in_files(folder) -> dict[str, torch.Tensor]:
    """{name: tensor without storage}, of the tensors in a folder's safetensors files, whole or in parts."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device='meta')
            for name, tensor in found.items()}


def read_parts(folder, tensors: dict) -> None:
    """Fills named tensors from a folder's safetensors files, whole or in parts, whichever process wrote them.

    Of a sharded tensor each process reads its own part; it needs no other process.
    """
    from torch.distributed import checkpoint
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*torch.distributed is disabled')
        checkpoint.load(tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)), no_dist=True)
