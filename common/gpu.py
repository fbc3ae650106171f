"""What a GPU needs: its peak FLOP/s, and torch.compile, which may also be used on a CPU."""
import re

import torch

PEAK_FLOPS = {  # dense bf16 (V100: fp16), from the vendors' data sheets
    'H100 PCIe': 756e12, 'H100': 989e12, 'H200': 989e12, 'H800': 989e12, 'A100': 312e12, 'A800': 312e12,
    'B200': 2250e12, 'L40S': 362e12, 'L4': 121e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that a GPU can reach, for the log's MFU; None if it is not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' and dtype == torch.bfloat16 else ''
    return next((flops for gpu, flops in PEAK_FLOPS.items() if re.search(rf'\b{gpu}\b', name)), None)


def set_compiler_options():
    """Set the options of torch.compile that training needs."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # else each block is compiled again, for its layer number
    torch._dynamo.config.recompile_limit = 64  # block masks are one function for all patterns and pairs of streams
    torch._dynamo.config.optimize_ddp = False  # DDP's graph splitter does not support FlexAttention
    functorch.backward_pass_autocast = 'off'  # as in eager mode: the backward of fp32 operations is fp32
    inductor.triton.mix_order_reduction = False  # silently wrong gradients: pytorch issue 193061
