"""Attention in bf16 on CPU, forward and backward: blocks of dense products beside PyTorch's fused kernel, both skipping the same blocks.

Decides `DENSE_T` in attn_kernels.py; in fp32 the fused kernel is the faster one. Also, for decoding, a cache in fp32 beside one in bf16.
"""
import torch

import attn_kernels
from bench import alternate, write_results

H, D, TOKENS = 8, 64, 4096  # heads, head size, tokens per call


def training(T, documents, dense):
    q, k, v = torch.randn(3, TOKENS // T, T, H, D, dtype=torch.bfloat16).requires_grad_().unbind(0)
    doc_start = (torch.arange(T) // 300 * 300).expand(TOKENS // T, T) if documents else None

    def call():
        attn_kernels.DENSE_T = T if dense else 0
        attn_kernels.attention(q, k, v, doc_start).sum().backward()
    return call


def decoding(batch_size, dtype, length=512):
    q = torch.randn(batch_size, 1, H, D, dtype=torch.bfloat16)
    cache = torch.randn(2, batch_size, length, H, D, dtype=dtype)
    positions = torch.full((batch_size, 1), length - 1)
    return lambda: attn_kernels.cached_attention(q, *cache, positions)


def main():
    rows = []
    for T in (256, 1024, 4096):
        for documents in (False, True):
            seconds = alternate({name: training(T, documents, name == 'dense') for name in ('dense', 'fused')}, rounds=7)
            rows.append({'pass': 'training', 'T': T, 'documents': documents, 'dense_over_fused_speed': round(seconds['fused'] / seconds['dense'], 2)})
    for batch_size in (1, 16):
        seconds = alternate({str(dtype)[6:]: decoding(batch_size, dtype) for dtype in (torch.float32, torch.bfloat16)}, rounds=50)
        rows.append({'pass': 'decoding', 'batch': batch_size, 'fp32_over_bf16_cache_speed': round(seconds['bfloat16'] / seconds['float32'], 2)})
    write_results('attention', rows)


if __name__ == '__main__':
    main()
