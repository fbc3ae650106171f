"""GPU specifics: peak FLOP/s, and options of torch.compile."""
import re

import torch

PEAK_FLOPS = {  # dense bf16 (V100: fp16), from the vendors' data sheets
    'H100 PCIe': 756e12, 'H100': 989e12, 'H200': 989e12, 'H800': 989e12, 'A100': 312e12, 'A800': 312e12,
    'B200': 2250e12, 'L40S': 362e12, 'L4': 121e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak FLOP/s, for MFU in the log, or None if the GPU is not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' and dtype == torch.bfloat16 else ''
    return next((flops for gpu, flops in PEAK_FLOPS.items() if re.search(rf'\b{gpu}\b', name)), None)


def set_compiler_options():
    """Set the options of torch.compile that training needs."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # avoids one compilation per layer number
    torch._dynamo.config.recompile_limit = 64  # one block-mask function serves all patterns
    torch._dynamo.config.optimize_ddp = False  # DDP's graph splitter does not support FlexAttention
    functorch.backward_pass_autocast = 'off'  # as in eager mode: fp32 operations have an fp32 backward
    inductor.triton.mix_order_reduction = False  # it gives wrong gradients (PyTorch issue 193061)
