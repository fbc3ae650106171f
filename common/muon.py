"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer."""
import torch


class MuonAndAdamW:
    """torch.optim.Muon and torch.optim.AdamW stepped together.

    It has what training reads of an optimizer: `param_groups`, `state` by parameter, and `found_inf`, a tensor that is
    1 where a step is to change nothing, or None. PyTorch's Muon knows no such tensor, so here each step waits for it.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.muon, self.adamw = muon, adamw
        self.param_groups = adamw.param_groups + muon.param_groups
        muon.state = self.state = adamw.state  # no parameter is in both
        self.found_inf = None

    def step(self) -> None:
        if self.found_inf is None or not self.found_inf:
            self.muon.step()
            self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def hidden_matrices(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights that Muon is meant for: those of linear layers, but for heads, which have a row for each id."""
    return {module.weight for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.endswith('head')}
