"""Edited models: subclasses that change one part of a model file, each a model of its own for every script.

    python train.py config/gpn_quick.py --model=gpn.NoDecay --out_dir=out/no_decay
    python sample.py out/no_decay "Return the"

The five edits of model_gpn change one equation each. The fast form in scans/gpn.py is for `model_gpn.Model` alone, so
they run step by step, by `Model.loop`. docs/gpn.md has the command that trains all of them and their results.
`standard.NanoGPT` is model_standard with nanoGPT's blocks, for the comparison in RESULTS.md.
"""
import torch
import torch.nn as nn

import model_gpn
import model_standard
from bench import nanogpt


class GateAtOne(model_gpn.Model):
    """Eq. 4 with its gate at 1: all of the predicted state is carried on."""

    def ground(self, u, s):
        return s + u


class PredictionNotCarried(model_gpn.Model):
    """An ordinary recurrent net: the grounded state is carried on, and the prediction made from it is only decoded."""

    def step(self, u, s, g, memory):
        return super().step(u, g, g, memory)


class KeyFromThisState(model_gpn.Model):
    """Eq. 8 with the key from this grounded state, like the value: the memory stores no transition."""

    def predict(self, last, g, memory):
        return super().predict(g, g, memory)


class NoWriteGate(model_gpn.Model):
    """Eq. 9 with beta = 1: every token is written in full."""

    class write_type(model_gpn.Write):
        def write_gate(self, g):
            return torch.ones_like(super().write_gate(g))


class NoDecay(model_gpn.Model):
    """Eq. 9 with gamma = 0: the memory does not fade, only writes change it."""

    class write_type(model_gpn.Write):
        def log_decay(self, g):
            return torch.zeros_like(super().log_decay(g))


class NanoGPT(model_standard.Model):
    """nanoGPT's blocks under model_standard's loss, for windows of at most 256 tokens, as its shakespeare_char.

    Reads n_layer, n_head, n_embd, n_ffn (nanoGPT's is 4 n_embd) and the vocabulary. Like nanoGPT it attends across the
    ends of documents. It has no cache: it decodes by recomputing its logits.
    """

    new_cache = extend = None
    positions = 256  # learned

    def __init__(self, config):
        nn.Module.__init__(self)
        c = self.config = config
        self.reach = 2 ** 30
        blocks = nanogpt.Model(c.n_layer, c.n_head, c.n_embd, c.vocab_size, self.positions, c.n_ffn)
        for name, part in blocks.named_children():
            self.add_module(name, part)

    def final_hidden(self, idx):
        if idx.shape[1] > self.positions:
            raise ValueError(f'windows of {idx.shape[1]} tokens: standard.NanoGPT has learned {self.positions} '
                             f'positions: give block_size = {self.positions} or less')
        return nanogpt.Model.final_hidden(self, idx)
