"""A model of nanoGPT's shape, reimplemented: learned positions, LayerNorm and GELU, no biases.

The loss and the interface are those of model_standard. Like nanoGPT, it attends across document
boundaries. It has no KV cache, so decoding recomputes all logits.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import CrossEntropy, check_sizes, mean_keys, n_matrix_weights
from model_standard import Model as Standard


@dataclass
class Config:
    shared = 'block_size',  # settings of train.py that the model needs

    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width; None: 4 n_embd
    block_size: int = 1024  # learned positions
    init_std: float = 0.02  # standard deviation of the initial weights
    vocab_size: int = 50304  # rows of the embedding table: token ids, then padding
    n_ids: int = 50257  # number of token ids; rows from n_ids on are padding
    eos_id: int | None = 50256  # end-of-document id: the target after it is ignored

    def __post_init__(self):
        check_sizes(self, n_head=1, block_size=1)
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd = {self.n_embd}: expected a multiple of n_head = {self.n_head}')
        self.n_ffn = self.n_ffn or 4 * self.n_embd


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(C, bias=False) for _ in range(2))
        self.qkv, self.attn_out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.ffn_in, self.ffn_out = nn.Linear(C, config.n_ffn, bias=False), nn.Linear(config.n_ffn, C, bias=False)

    def forward(self, h):
        """Apply the block: h (B, T, C) -> (B, T, C)."""
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                   for x in self.qkv(self.attn_norm(h)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.attn_out(out)
        return h + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(h))))


class Model(Standard):
    new_cache = extend = None

    def __init__(self, config):
        nn.Module.__init__(self)
        c = self.config = config
        self.embed, self.position = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.LayerNorm(c.n_embd, bias=False)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(c.vocab_size)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                scale = (2 * c.n_layer) ** -0.5 if name.endswith('_out.weight') else 1.0
                nn.init.normal_(p, std=c.init_std * scale)

    def sees(self, q, k):
        return k.pos <= q.pos

    def final_hidden(self, idx):
        c, T = self.config, idx.shape[1]
        if T > c.block_size:
            raise ValueError(f'{T} tokens, but the model has {c.block_size} learned positions: give fewer')
        h = self.embed(idx) + self.position(torch.arange(T, device=idx.device))
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def flops_per_token(self, T):
        c = self.config
        return 6 * n_matrix_weights(self) + 12 * c.n_layer * c.n_embd * mean_keys(self.sees, T)
