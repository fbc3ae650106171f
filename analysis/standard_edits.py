"""model_standard with other blocks: nanoGPT's shape, to be trained by every script as `--model=standard.NanoGPT`.

baseline.py trains it with 256 positions, beside model_standard.
"""
import torch.nn as nn

from bench import nanogpt
from model_standard import Model


class NanoGPT(Model):
    """`bench.nanogpt.Model` under `model_standard`'s loss: the same positions count, those after an eos do not.

    It attends over the ends of documents, as nanoGPT does. Of the settings it reads n_layer, n_head, n_embd, n_ffn
    (nanoGPT's is 4 n_embd) and those of the vocabulary. It has no cache: it decodes by its logits.
    """

    new_cache = extend = None
    positions = 1024  # rows of the table of positions, and so the longest window

    def __init__(self, config):
        nn.Module.__init__(self)
        c = self.config = config
        self.reach = 2 ** 30
        for name, part in nanogpt.Model(c.n_layer, c.n_head, c.n_embd, c.vocab_size, self.positions,
                                        c.n_ffn).named_children():
            self.add_module(name, part)

    def final_hidden(self, idx):
        if idx.shape[1] > self.positions:
            raise ValueError(f'windows of {idx.shape[1]} tokens: standard.{type(self).__name__} has learned '
                             f'{self.positions} positions: give block_size = {self.positions} or less')
        return nanogpt.Model.final_hidden(self, idx)


class NanoGPT256(NanoGPT):
    """With positions for the windows of nanoGPT's shakespeare_char, 256 tokens."""

    positions = 256
