"""Edited models: subclasses that change one part of a model file. Only common.export refuses them.

    python train.py config/gpn_quick.py --model=gpn.NoDecay --out_dir=out/no_decay
    python sample.py out/no_decay "Return the"

Each of the five edits of model_gpn changes one equation (results in docs/gpn.md). They run step by
step, because the fast form in scans/gpn.py applies to `model_gpn.Model` only. `standard.NanoGPT` is
model_standard with nanoGPT's blocks, for the comparison in RESULTS.md.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpn
import model_standard
from attn_kernels import CrossEntropy


class GateAtOne(model_gpn.Model):
    """Eq. 4 with the gate fixed at 1: the predicted state is kept in full."""

    def ground(self, u, s):
        return s + u


class PredictionNotCarried(model_gpn.Model):
    """An ordinary RNN: the grounded state is recurrent, and the prediction is only decoded."""

    def step(self, u, s, g, memory):
        return super().step(u, g, g, memory)


class KeyFromThisState(model_gpn.Model):
    """Eq. 8 with key and value from the same grounded state: the memory stores no transitions."""

    def predict(self, last, g, memory):
        return super().predict(g, g, memory)


class NoWriteGate(model_gpn.Model):
    """Eq. 9 with beta = 1: every token is fully written."""

    class write_type(model_gpn.Write):
        def write_gate(self, g):
            return torch.ones_like(super().write_gate(g))


class NoDecay(model_gpn.Model):
    """Eq. 9 with gamma = 0: the memory does not decay and only changes by writes."""

    class write_type(model_gpn.Write):
        def log_decay(self, g):
            return torch.zeros_like(super().log_decay(g))


class NanoGPTBlock(nn.Module):
    """nanoGPT's block, reimplemented: LayerNorm, PyTorch's attention and GELU, without biases."""

    def __init__(self, n_embd, n_head, n_ffn):
        super().__init__()
        self.n_head = n_head
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(n_embd, bias=False) for _ in range(2))
        self.qkv, self.attn_out = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.ffn_in, self.ffn_out = nn.Linear(n_embd, n_ffn, bias=False), nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, h):
        """Apply the block: h (B, T, C) -> (B, T, C)."""
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                   for x in self.qkv(self.attn_norm(h)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.attn_out(out)
        return h + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(h))))


class NanoGPT(model_standard.Model):
    """nanoGPT's blocks and learned positions with model_standard's loss. Windows up to 256 tokens.

    Uses n_layer, n_head, n_embd, n_ffn (4 n_embd in nanoGPT) and the vocabulary. Like nanoGPT, it
    attends across document boundaries. It has no KV cache, so decoding recomputes all logits.
    """

    new_cache = extend = None

    def __init__(self, config):
        nn.Module.__init__(self)
        c = self.config = config
        self.reach = 2 ** 30
        self.embed, self.position = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(256, c.n_embd)
        self.blocks = nn.ModuleList(NanoGPTBlock(c.n_embd, c.n_head, c.n_ffn) for _ in range(c.n_layer))
        self.norm = nn.LayerNorm(c.n_embd, bias=False)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(config.vocab_size)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                scale = (2 * c.n_layer) ** -0.5 if name.endswith('_out.weight') else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def final_hidden(self, idx):
        n_positions = len(self.position.weight)
        if idx.shape[1] > n_positions:
            raise ValueError(f'windows of {idx.shape[1]} tokens, but standard.NanoGPT has {n_positions} learned '
                             f'positions: give block_size = {n_positions} or less')
        h = self.embed(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            h = block(h)
        return self.norm(h)
