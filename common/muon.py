"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer."""
from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode


class MuonAndAdamW:
    """torch.optim.Muon and torch.optim.AdamW stepped together.

    It has what training reads of an optimizer: `param_groups`, `state` by parameter, and `found_inf`, a tensor that is
    1 where a step is to change nothing, or None. PyTorch's Muon knows no such tensor, so here each step waits for it.
    dtype: of the products that make an update orthogonal. PyTorch has them in bfloat16, which takes a CPU without bf16
    units longer than all the rest of a step.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW, dtype: torch.dtype = torch.bfloat16):
        self.muon, self.adamw, self.dtype = muon, adamw, dtype
        self.param_groups = adamw.param_groups + muon.param_groups
        muon.state = self.state = adamw.state  # no parameter is in both
        self.found_inf = None

    def step(self) -> None:
        if self.found_inf is None or not self.found_inf:
            with nullcontext() if self.dtype == torch.bfloat16 else _BFloat16As(self.dtype):
                self.muon.step()
            self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


class _BFloat16As(TorchFunctionMode):
    """Within it x.bfloat16() is a new tensor of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16:
            return args[0].to(self.dtype, copy=True)
        return func(*args, **(kwargs or {}))


def hidden_matrices(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights that Muon is meant for: those of linear layers, but for heads, which have a row for each id."""
    return {module.weight for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.endswith('head')}
