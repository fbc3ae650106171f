"""torch.compile, and the peak FLOP/s of GPUs."""
import re

import torch

PEAK_FLOPS = {  # dense bf16 (V100: fp16), from the vendors' data sheets
    'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200 NVL': 835e12, 'H100': 989e12, 'H200': 989e12, 'H800': 989e12,
    'A100': 312e12, 'A800': 312e12, 'B200': 2250e12, 'L40S': 362e12, 'L4': 121e12, 'RTX 4090': 165e12,
    'RTX 3090': 71e12, 'V100': 125e12}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak FLOP/s, for MFU in the log, or None if the GPU is not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' and dtype == torch.bfloat16 else ''
    return next((flops for gpu, flops in PEAK_FLOPS.items() if re.search(rf'\b{gpu}\b', name)), None)


def set_compiler_options():
    """Set the options of torch.compile that training needs."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    torch._dynamo.config.recompile_limit = 64  # one block-mask function serves all patterns
    torch._dynamo.config.optimize_ddp = False  # DDP's graph splitter does not support FlexAttention
    functorch.backward_pass_autocast = 'off'  # as in eager mode: fp32 operations have an fp32 backward
    inductor.triton.mix_order_reduction = False  # it gives wrong gradients (PyTorch issue 193061)


def compile_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the compiled model. Compiles a model with `blocks` in place, part by part.

    Equal blocks compile once, which is several times faster than compiling all layers as one graph.
    """
    in_parts = any(hasattr(module, 'blocks') for module in model.modules())
    for part in _parts(model):
        dynamic = getattr(part, 'dynamic', None)
        if in_parts or dynamic:  # parts of the loss are `dynamic`; no model has them in its graph
            part.compile(dynamic=dynamic)
    return model if in_parts else torch.compile(model)


def _parts(module):
    """Yield the elements of a model's module lists, and its other parts that are not PyTorch's."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            yield from child
        elif hasattr(child, 'blocks'):
            yield from _parts(child)
        elif not type(child).__module__.startswith('torch.'):
            yield child
