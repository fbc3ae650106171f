"""Dry run of train.py: print sizes and costs, and estimate a step's GPU memory.

The estimate runs a step on meta tensors, which have no storage, and counts the bytes they would
take: `activation_bytes`. Weights, gradients and the optimizer's states are added.
"""
import copy
import math
import os
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lm_architectures.files import ROOT, UserError, command
from lm_architectures.machine.devices import pick_dtype
from lm_architectures.machine.wrapping import gathered_modules, linear_weights
from lm_architectures.run import folders, models

MAX_OPERATORS = 40_000  # operators of a step that are counted, in about 4 s
PRODUCTS = {F.linear, F.conv1d, torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__}
GATES, MUL = {F.silu, F.gelu, F.relu}, {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__}


def dry_run(s, config, data, n_processes: int, make_optimizer: Callable) -> None:
    """Print the size and cost of a run, its GPU memory, and whether that fits in s.gpu_gib.

    n_processes: they share the weights with parallel = fsdp. make_optimizer: train.py's.
    """
    model = meta_model(s.model, config, models.code_folder(s))
    models.describe(s, model, data)
    most = math.ceil(s.batch_size / n_processes)  # sequences per process and step
    n_rows, n_params = min(s.micro_batch_size, most), models.count_parameters(model)
    n_shards = (s.shard or n_processes) if s.parallel == 'fsdp' else 1
    states, moments = optimizer_bytes(model, lambda model: make_optimizer(model, s)), 'moments'
    if states is None:
        states, moments = 8 * n_params, 'two moments, assumed because this optimizer needs data'
    gradients, gathered, dtype = n_params, 0, pick_dtype(s.dtype, 'cuda')
    if n_shards > 1:  # FSDP gathers two blocks at a time, in `dtype`, and all else for the whole step, in fp32
        blocks = gathered_modules(model)
        for p in linear_weights(blocks):
            p.data = p.data.to(dtype)
        sizes = [sum(p.numel() for p in linear_weights([block])) for block in blocks]
        others, two_blocks = n_params - sum(sizes), 2 * max(sizes, default=0)
        gathered = 4 * others + dtype.itemsize * two_blocks
        if n_rows == most:  # otherwise, gradients wait for the last micro-batch as a whole
            gradients = n_params / n_shards + others + two_blocks
    held = (4 * n_params + states) / n_shards + 4 * gradients + gathered
    share = f' (1/{n_shards}, and what FSDP gathers)' if n_shards > 1 else ''
    print(f'estimated memory per process: {held / 2**30:.2f} GiB for weights, gradients and {moments}{share}', end='',
          flush=True)
    if any(getattr(module, 'fast', None) for module in model.modules()):
        return print('; activations in the scan of a recurrent model are not estimated')
    try:
        with models.model_errors(s.model):
            needed = held + activation_bytes(model, dtype, s.block_size, n_rows) + 2 ** 25  # cuBLAS's workspace
    except TimeoutError:
        return print(f'; activations are left out: a step of {s.block_size} tokens takes over '
                     f'{MAX_OPERATORS:,} operators')
    except (RuntimeError, TypeError) as error:
        return print(f'; activations are left out: without data, a step fails {place(error)}')
    print(f', {needed / 2**30:.2f} GiB at the peak of a step on a GPU, with micro-batches of {n_rows} and matrix '
          f'products in {str(dtype)[6:]}')
    if s.gpu_gib is not None:  # 5% are for the driver and fragmentation
        print(f'a step {"fits" if needed <= 0.95 * s.gpu_gib * 2 ** 30 else "does not fit"} {s.gpu_gib:g} GiB')


# ---- a model without weights, data that do not exist ----

def meta_model(name: str, config, code: str | None = None) -> torch.nn.Module:
    """Return a model on the meta device, for names, shapes, costs. UserError if impossible."""
    try:
        with torch.device('meta'), models.model_errors(name):
            return models.model_file(name, code).Model(config)
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error).lower() for word in ('overflow', 'meta')):
            raise
        raise UserError(f'model {name!r} is too large, or its __init__ reads a value from a tensor without data: it '
                        f'fails {place(error)}')


def model_without_weights(name: str, config, code: str | None = None) -> torch.nn.Module | None:
    """Return a model on the meta device, to get weights later. None if it would lose more there.

    That is a number that `__init__` reads from a tensor, or a tensor that is no buffer.
    """
    try:
        model = meta_model(name, config, code)
    except UserError:
        return None
    own = [{**vars(module), '_parameters': None, '_buffers': None} for module in model.modules()]
    return None if any(isinstance(x, torch.Tensor) for x in tree_leaves(own)) else model


def place(error: Exception) -> str:
    """Return where an error arose, outside of libraries and this file: 'in FILE, line 7: CODE'."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if 'site-packages' not in frame.filename and frame.filename != __file__:
            return f'in {os.path.basename(frame.filename)}, line {frame.lineno}: {frame.line}'
    return 'in its backward pass'


def assumed_data(s, record) -> SimpleNamespace:
    """Return a stand-in for missing data, with the vocabulary of a run or of s.assumed_ids ids."""
    if s.init_from and not record:
        record = folders.read_run(s.init_from)
    data = SimpleNamespace(**{
        'tokenizer': 'gpt2' if s.assumed_ids == 50257 else 'FILE', 'n_ids': s.assumed_ids, 'eos_id': s.assumed_ids - 1,
        'sha256': '', 'bos': False, **(record or {}).get('data', {}), 'folder': s.data, 'T': None,
        'splits': {'train': {'tokens': s.max_tokens}}, 'n_rows': lambda split, T: 1})
    data.sources = {s.data: (1.0, data)}
    return data


def build_hint(s, tokenizer: str) -> str:
    """Return the end of a sentence: how to build the data that a config names, if that is known."""
    if s.make_data and s.data in s.make_data:
        make = s.make_data.replace('prepare_fineweb.py', os.path.relpath(ROOT / 'prepare_fineweb.py'))
    elif s.data == type(s).data:
        size = f'--max_tokens={1.05 * s.max_tokens:.3g}'.replace('e+', 'e')  # 5% more, for validation
        options = [f'--tokenizer={tokenizer}'] * (tokenizer != 'gpt2') + [f'--out_dir={s.data}', size]
        make = command('prepare_fineweb.py', *options)
    else:
        return ''
    return f'. To build it: {make}'


# ---- the bytes of a step on tensors without storage ----

class UnknownNumbersAreOne(TorchDispatchMode):
    """Let an optimizer read numbers, such as norms, from tensors without storage."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        try:
            return operator(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return 1


def optimizer_bytes(model: torch.nn.Module, make_optimizer: Callable) -> int | None:
    """Return the bytes of an optimizer's states, None if it cannot step without data.

    model: on the meta device.
    """
    model = copy.deepcopy(model)
    with FakeTensorMode(), UnknownNumbersAreOne():
        fakes = {p: torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
                 for p in model.parameters()}  # on the CPU: fused optimizers refuse the meta device
        for module in model.modules():
            for name, p in [*module.named_parameters(recurse=False)]:
                setattr(module, name, fakes[p])
                fakes[p].grad = torch.empty_like(fakes[p])
        optimizer = make_optimizer(model)
        try:
            optimizer.step()
        except Exception:  # whatever an optimizer does with the numbers
            return None
    return sum(x.nbytes for x in tree_leaves([*optimizer.state.values()]) if isinstance(x, torch.Tensor))


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors created inside: `live` now, `peak` at most."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes, self.n_operators = {}, 0  # {address of a storage: its bytes}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.n_operators += 1
        if self.n_operators > MAX_OPERATORS:
            raise TimeoutError  # a recurrence that runs token by token
        if operator is torch.ops.aten.nonzero.default and args[0].is_meta:  # its size depends on the values: assume all
            out = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            out = operator(*args, **(kwargs or {}))
        old = {storage._cdata for storage in self._storages(args)}  # also of weights, made outside
        for storage in self._storages(out):
            if storage._cdata not in self.sizes and storage._cdata not in old:
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.live)
        return out

    def _storages(self, values):
        return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]

    def _forget(self, address):
        self.live -= self.sizes.pop(address)


class Fused(torch.autograd.Function):
    """The memory of a compiled loss or norm: the backward pass needs only the input x."""

    @staticmethod
    def forward(ctx, x, shape):
        ctx.save_for_backward(x)
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(*ctx.saved_tensors), None


class EmulateGPU(TorchFunctionMode):
    """Matrix products in the dtype of the CPU's autocast, wherever that is on, and compiled blocks.

    Attention, RMSNorm and cross-entropy are fused. `.to(torch.float32)` takes no memory: the
    compiler fuses it with what reads the result, which is the loss. The gate of a SwiGLU is not
    kept for the backward pass, which computes it again.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype, is_on = torch.get_autocast_dtype('cpu'), torch.is_autocast_enabled('cpu')

        def cast(x):
            return x.to(dtype) if is_on and isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
        if function is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*map(cast, args[:3]))[0]
        if function is torch.Tensor.to and args[0].dtype == dtype and torch.float32 in args:
            return args[0]
        if function is F.cross_entropy:
            return Fused.apply(args[0], args[1].shape if kwargs.get('reduction') == 'none' else ())
        if function is F.rms_norm:
            return Fused.apply(args[0], args[0].shape)
        if function in MUL:  # keep the input of a gate instead of the gate
            args = [getattr(x, 'gate_of', x) for x in args]
        out = function(*(tree_map(cast, args) if function in PRODUCTS else args), **(kwargs or {}))
        if function in GATES:
            out.gate_of = args[0]
        return out


def activation_bytes(model: torch.nn.Module, dtype: torch.dtype, T: int, n_rows: int) -> int:
    """Return peak bytes of forward and backward on n_rows windows, without weights and gradients.

    model: usually on the meta device. Assumes one document per window. Memory inside our C and
    Triton operators is not counted.
    """
    device = next(model.parameters()).device
    for p in model.parameters():
        p.grad = torch.empty_like(p)  # gradients exist from the second micro-batch on
    tokens = torch.zeros(n_rows, T, dtype=torch.int64, device=device)
    autocast = torch.autocast('cpu', dtype, enabled=dtype != torch.float32)  # a model may turn it off
    with LiveBytes() as live, device, autocast, EmulateGPU():
        out = model(tokens, tokens)
        models.check_forward(out)
        loss = out['loss']
        # loss.backward() leaves EmulateGPU, and checkpointed blocks would run again without it
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return live.peak
