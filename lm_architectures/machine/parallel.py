"""Several processes: DDP (each has a copy of the model) and FSDP (each has a shard of it).

All functions also work with a single process. wrapping.py wraps a model for several.
"""
import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lm_architectures.files import UserError, first_line

# ---- processes ----

def ranks() -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size) of torchrun or docs/train.sbatch.

    (0, 1, 0, 1) for a single process, even if it inherited RANK from another program.
    """
    needed = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR'}
    is_worker = 'TORCHELASTIC_RUN_ID' in os.environ or needed <= os.environ.keys()
    defaults = {'RANK': 0, 'WORLD_SIZE': 1, 'LOCAL_RANK': 0, 'LOCAL_WORLD_SIZE': 1}
    return tuple(int(os.environ.get(name, default)) if is_worker else default for name, default in defaults.items())


def init_distributed(backend: str) -> None:
    """Initialize torch.distributed if there are several processes. Prints a hint after 10 s."""
    rank, world, *_ = ranks()
    if world == 1 or dist.is_initialized():
        return
    os.environ.setdefault('MASTER_PORT', '29500')
    line = (f'process {rank} is waiting for all {world} processes at {os.environ["MASTER_ADDR"]}: start the others, or '
            'unset RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR to run one process')
    timer = threading.Timer(10, print, [line], {'file': sys.stderr, 'flush': True})
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(backend)
    except (dist.DistNetworkError, ValueError) as error:
        raise UserError(f'process {rank} cannot connect at {os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]} '
                        f'({first_line(error)}): if another job uses the port, set MASTER_PORT to a free one')
    finally:
        timer.cancel()
    if backend == 'gloo':  # with NCCL, this would wait for the others after an error of one process
        atexit.register(dist.destroy_process_group)


# ---- values ----

def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather(value) -> list:
    """Return a list with the value of each process, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def first_not_none(value):
    """Return the lowest rank's value that is not None, or None if there is none."""
    return next((v for v in all_gather(value) if v is not None), None)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool) -> bool:
    """Return True if the flag is set on any process."""
    return bool(all_reduce(torch.tensor([flag], dtype=torch.int64)))


def leave_together() -> None:
    """End this process once all have come here, unless it is the only one."""
    if world() > 1:
        any_rank(False)  # rank 0 may still gather weights from the others, for its sample
        sys.stdout.flush()
        os._exit(0)  # a normal exit sometimes aborts in gloo's threads


# ---- the model ----

def is_sharded(model: torch.nn.Module) -> bool:
    return hasattr(model, 'set_requires_gradient_sync')  # added by `fully_shard`


def reduce_gradients(model: torch.nn.Module, ddp: torch.nn.Module, on: bool) -> None:
    """Turn gradient reduction of the next backward pass on or off. ddp: the wrapped model."""
    if is_sharded(model):
        model.set_requires_gradient_sync(on)
        model.set_is_last_backward(on)
    elif isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        ddp.require_backward_grad_sync = on


@contextmanager
def gather_weights(model: torch.nn.Module) -> Iterator[None]:
    """Gather all weights on every process, to run the model without training it. Collective."""
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


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one; other tensors unchanged."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor
