"""Weights & Biases, for runs with --wandb_project."""
import dataclasses

from lm_architectures.files import UserError


def start_wandb(s, config, known: str | None):
    """Start or continue a run of Weights & Biases. known: its id, None for a new one."""
    try:
        import wandb
        return wandb.init(project=s.wandb_project, name=s.out_dir, id=known, resume='allow',
                          config=dataclasses.asdict(s) | dataclasses.asdict(config), allow_val_change=True)
    except Exception as error:  # not installed, no key, no network
        raise UserError(f'wandb could not start ({type(error).__name__}: {error}): pip install wandb, run '
                        '`wandb login`, or set --wandb_project=None')
