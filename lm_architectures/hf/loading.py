"""Load an export as its users will, without this repository. export.py runs this text elsewhere.

    python -c TEXT EXPORT REFERENCE     REFERENCE: file with tokens and the run's logits for them

Without logits, for a large model, tensors are compared by name and shape.
"""
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.modules.update(lm_architectures=None, attn_kernels=None)  # cannot be imported, even if installed
reference = load_file(sys.argv[2])
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=True, dtype=torch.float32 if reference else 'auto', output_loading_info=True)
if any(info.values()):
    sys.exit(f'its tensors do not fit its code: {info}')
if reference:
    with torch.no_grad():
        logits = model.eval()(reference['tokens']).logits[..., :reference['logits'].shape[-1]]
    worst = (logits - reference['logits']).abs().max()
    if not worst <= 1e-3 * logits.abs().max().clamp(min=1):
        sys.exit(f'its logits differ from those of the run by up to {worst:.1e}')
