"""GPN with one equation edited: five subclasses of `model_gpn.Model`.

Each subclass changes one equation. The fast form in scans/gpn.py is for `model_gpn.Model` alone, so these train,
evaluate and decode step by step, by `Model.loop`. Each is a model of its own for every script:

    python train.py config/gpn_quick.py --model=gpn.NoDecay --out_dir=out/no_decay
    python sample.py out/no_decay "Return the"

docs/gpn.md has the command that trains all of them beside GPN, and the results.
"""
import torch

from model_gpn import Model, Write


class GateAtOne(Model):
    """Eq. 4 with its gate at 1: all of the predicted state is carried on."""

    def ground(self, u, s):
        return s + u


class PredictionNotCarried(Model):
    """An ordinary recurrent net: the grounded state is carried on, and the prediction made from it is only decoded."""

    def step(self, u, s, g, memory):
        return super().step(u, g, g, memory)


class KeyFromThisState(Model):
    """Eq. 8 with the key from this grounded state, like the value: the memory stores no transition."""

    def predict(self, last, g, memory):
        return super().predict(g, g, memory)


class NoWriteGate(Model):
    """Eq. 9 with beta = 1: every token is written in full."""

    class write_type(Write):
        def write_gate(self, g):
            return torch.ones_like(super().write_gate(g))


class NoDecay(Model):
    """Eq. 9 with gamma = 0: the memory does not fade, only writes change it."""

    class write_type(Write):
        def log_decay(self, g):
            return torch.zeros_like(super().log_decay(g))
