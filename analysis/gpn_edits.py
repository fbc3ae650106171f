"""GPN with one equation edited: five subclasses of `model_gpn.Model`.

A subclass is an edit of the equations alone. scans/gpn.py has none of them: `choose_scan` finds that it differs, and
they train, evaluate and decode by `Model.loop`. Each is a model of its own for every script:

    python train.py config/gpn_quick.py --model=gpn.NoDecay --out_dir=out/no_decay
    python sample.py out/no_decay "Return the"

docs/gpn.md has the command that trains them all beside GPN, and the table.
"""
import torch

from model_gpn import Model, Write


class GateAtOne(Model):
    """Eq. 4 with its gate at 1: all of the predicted state is carried on."""

    def ground(self, u, s):
        return s + u


class PredictionNotCarried(Model):
    """A recurrent net as others: the grounded state is carried on, and what was predicted from it is decoded only."""

    def step(self, u, s, g, memory):
        return super().step(u, g, g, memory)


class KeyFromThisState(Model):
    """Eq. 8 with the key, as the value, from this grounded state: the memory learns no transition."""

    def predict(self, last, g, memory):
        return super().predict(g, g, memory)


class NoWriteGate(Model):
    """Eq. 9 with beta = 1: every token is written whole."""

    class write_type(Write):
        def write_gate(self, g):
            return torch.ones_like(super().write_gate(g))


class NoDecay(Model):
    """Eq. 9 with gamma = 0: the memory forgets nothing by itself, a write corrects it."""

    class write_type(Write):
        def log_decay(self, g):
            return torch.zeros_like(super().log_decay(g))
