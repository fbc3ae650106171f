"""Wrap a model for several processes: DDP copies its weights, FSDP shards them.

docs/scale.md explains which weights FSDP gathers when.
"""
import torch
import torch.distributed as dist

from lm_architectures.machine.parallel import all_gather, rank, world


def gathered_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that FSDP gathers one at a time: the blocks.

    A model that reads a block's weights without calling it must set `shard_blocks = False`.
    """
    return list(dict.fromkeys(getattr(model, 'blocks', ()))) if getattr(model, 'shard_blocks', True) else []


def linear_weights(blocks: list[torch.nn.Module]) -> set[torch.nn.Parameter]:
    """Return the weights of blocks that FSDP gathers in the dtype of matrix products."""
    layers = [layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    return {p for layer in layers for p in layer.parameters()}


def shard_model(model: torch.nn.Module, device: torch.device, n_shards: int | None,
                dtype: torch.dtype = torch.float32) -> None:
    """Shard rank 0's weights in place with FSDP. On other ranks, the model may be on meta.

    n_shards consecutive ranks hold one copy of the weights (None: all ranks). dtype: of matrix
    products. Blocks gather the weights of linear layers in it, because autocast would round them
    anyway. Their other weights (norms, decays) stay in fp32: the model gathers them with its own.
    """
    from torch.distributed.device_mesh import init_device_mesh  # its import takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    n_shards = n_shards or world()
    mesh = init_device_mesh(device.type, (world() // n_shards, n_shards), mesh_dim_names=('copies', 'parts'))
    if n_shards == world():
        mesh = mesh['parts']
    whole, blocks, policy, others = _tensors(model), gathered_modules(model), MixedPrecisionPolicy(), []
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        linear = linear_weights(blocks)
        others = [p for block in blocks for p in block.parameters() if p not in linear]
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=set(others))
    model._others = torch.nn.ParameterList(others)  # FSDP finds the model's own weights outside of its blocks
    fully_shard(model, mesh=mesh)
    del model._others
    torch.set_rng_state(all_gather(torch.get_rng_state())[0])  # as if all ranks had made the weights
    if rank() > 0:
        model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _tensors(model).items():  # one at a time, to free what rank 0 has sent
            full = whole.pop(name) if rank() == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.broadcast(full, 0)
            tensor.copy_(shard_like(full, tensor))


def shard_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device of `other`, and this process's shard if `other` is sharded."""
    if not hasattr(other, 'device_mesh') or tensor.shape != other.shape:
        return tensor.to(other.device)
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def _tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


class Accumulating(torch.nn.Module):
    """A model whose micro-batches add up in DDP's buckets. Without targets, all gradients are 0."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, targets):
        if targets is None:
            return 0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        return self.model(idx, targets)


def wrap_model(model: torch.nn.Module, compiled: torch.nn.Module, machine, s) -> torch.nn.Module:
    """Return the module to train on several processes. FSDP shards it, or DDP wraps it.

    s has `parallel`, `shard`, `batch_size` and `micro_batch_size`.
    """
    if s.parallel == 'fsdp':  # on CPUs, samples are generated without autocast, so with fp32 weights
        shard_model(model, machine.device, s.shard, machine.dtype if machine.device.type == 'cuda' else torch.float32)
        return compiled
    accumulates = s.batch_size > s.micro_batch_size * world()
    ddp = torch.nn.parallel.DistributedDataParallel(
        Accumulating(compiled) if accumulates else compiled,
        device_ids=[machine.device] if machine.device.type == 'cuda' else None,
        gradient_as_bucket_view=True)  # else 4 bytes per weight more
    for _ in range(2 * accumulates):  # gradients move into the buckets, and the second pass makes DDP's final buckets
        ddp(None, None).backward()
    ddp.keeps_gradients = accumulates  # train_step sets them to 0 in place, because they are views of the buckets
    return ddp
