"""One optimizer: Muon for a model's hidden matrices, AdamW for the rest."""
import torch

from lm_architectures.files import UserError


class MuonAndAdamW:
    """torch.optim.Muon and AdamW stepped together; has `param_groups` and `state` by parameter."""

    def __init__(self, hidden: dict, adamw: torch.optim.AdamW, learning_rate: float, weight_decay: float):
        """hidden: the keys are the parameters for Muon, see `hidden_matrices`."""
        if not hidden:
            raise UserError('optimizer = muon needs linear layers other than heads, but this model has none: use adamw')
        self.muon = torch.optim.Muon(hidden, lr=learning_rate, weight_decay=weight_decay,
                                     adjust_lr_fn='match_rms_adamw')
        self.adamw = adamw
        self.param_groups = adamw.param_groups + self.muon.param_groups
        self.muon.state = self.state = adamw.state  # no parameter is in both

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def hidden_matrices(model: torch.nn.Module) -> dict[torch.nn.Parameter, None]:
    """Return the weights for Muon, in order: those of linear layers, except heads."""
    return {module.weight: None for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
            and not name.endswith('head') and module.weight.requires_grad}
