"""A Transformer of nanoGPT's shape, for the benchmarks: what `model_standard.py` is measured beside.

GPT-2's block without biases: LayerNorm, learned positions, GELU 4 C, a tied head, PyTorch's own attention, and all
logits in memory. nanoGPT's choices, none of its code. Documents are not kept apart.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_ffn):
        super().__init__()
        self.n_head = n_head
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(n_embd, bias=False) for _ in range(2))
        self.qkv, self.attn_out = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.ffn_in, self.ffn_out = nn.Linear(n_embd, n_ffn, bias=False), nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, h):
        """h (B, T, C) -> (B, T, C)."""
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                   for x in self.qkv(self.attn_norm(h)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.attn_out(out)
        return h + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(h))))


class Model(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, vocab_size, block_size, n_ffn=None):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, n_ffn or 4 * n_embd) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                scale = (2 * n_layer) ** -0.5 if name.endswith('_out.weight') else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def final_hidden(self, idx):
        """What the head multiplies. idx (B, T) -> (B, T, C)."""
        h = self.embed(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64 -> {'loss'}: mean nats per token."""
        logits = self.head(self.final_hidden(idx))
        return {'loss': F.cross_entropy(logits.flatten(0, 1), targets.flatten())}
