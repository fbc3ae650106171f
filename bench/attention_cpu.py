"""Attention in bf16 on CPU: blocks of dense products beside PyTorch's fused kernel, both skipping the same blocks.

Decides `DENSE_T` in attn_kernels.py; in fp32 the fused kernel is the faster one. Also, for decoding, a cache in
bf16 beside one in fp32, and its plain products beside the fused kernel.

Two streams, window 64: tiles of dense products beside one library call with a boolean mask over the keys of both
streams; tiles of 256 queries beside 128; probabilities kept for the backward beside computed again, which past
`DENSE_T` saves memory.
"""
import sys

import torch
import torch.nn.functional as F

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


def two_streams(T, documents, dtype, tile=256, keep=True, one_call=False):
    B, window = max(1, TOKENS // 2 // T), 64
    q, k, v = torch.randn(3, B, 2, T, H, D, dtype=dtype).requires_grad_().unbind(0)
    doc_start = (torch.arange(T) // 300 * 300).expand(B, T) if documents else None

    def masked_call():
        position = torch.arange(T)
        mask = attn_kernels.two_stream_visible(position, position, position, [None, window], doc_start)
        q_all, k_all, v_all = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
        F.scaled_dot_product_attention(q_all, k_all, v_all, mask.unsqueeze(-3)).sum().backward()

    def tiles():
        attn_kernels.DENSE_T = T if keep else 0
        attn_kernels.QUERY_BLOCK = 2 * tile  # tiles are half of it
        attn_kernels.two_stream_attention(q, k, v, 'input', window, doc_start).sum().backward()
    return masked_call if one_call else tiles


def decoding(batch_size, dtype, fused=False, length=512):
    q = torch.randn(batch_size, 1, H, D, dtype=torch.bfloat16)
    cache = torch.randn(2, batch_size, H, length, D, dtype=dtype)
    mask = torch.ones(batch_size, 1, 1, length, dtype=torch.bool)
    if fused:
        return lambda: F.scaled_dot_product_attention(q.transpose(1, 2), *cache, attn_mask=mask)
    return lambda: attn_kernels.slot_attention(q, *cache, mask[:, 0])


def figures(toy):
    """The rows: training with one stream, with two, decoding."""
    for T in (32,) if toy else (256, 1024, 4096):
        for documents in (False, True):
            sides = {name: training(T, documents, name == 'dense') for name in ('dense', 'fused')}
            seconds = alternate(sides, rounds=1 if toy else 7)
            yield {'pass': 'training', 'T': T, 'documents': documents,
                   'dense_over_fused_speed': round(seconds['fused'] / seconds['dense'], 2)}
    forms = {'one_call': dict(one_call=True), 'tiles_of_128': dict(tile=128), 'tiles_of_256': {},
             'computed_again': dict(keep=False)}
    for dtype in (torch.bfloat16, torch.float32):
        for T in (32,) if toy else (256, 1024, 2048):
            for documents in (False, True):
                sides = {name: two_streams(T, documents, dtype, **form) for name, form in forms.items()}
                seconds = alternate(sides, rounds=1 if toy else 3)
                of_one_call = {f'{name}_over_one_call_speed': round(seconds['one_call'] / seconds[name], 2)
                               for name in forms if name != 'one_call'}
                yield {'pass': 'two streams, training', 'dtype': str(dtype)[6:], 'T': T, 'documents': documents,
                       **of_one_call}
    for batch_size in (1, 8, 16):
        sides = {'bfloat16': (torch.bfloat16,), 'float32': (torch.float32,), 'fused': (torch.bfloat16, True)}
        functions = {name: decoding(batch_size, *side) for name, side in sides.items()}
        seconds = alternate(functions, rounds=1 if toy else 50)
        yield {'pass': 'decoding', 'batch': batch_size,
               'bf16_over_fp32_cache_speed': round(seconds['float32'] / seconds['bfloat16'], 2),
               'bf16_products_over_fused_speed': round(seconds['fused'] / seconds['bfloat16'], 2)}


def main(argv=None):
    toy = '--toy' in (sys.argv if argv is None else argv)
    settings = attn_kernels.DENSE_T, attn_kernels.QUERY_BLOCK
    write_results('attention', figures(toy), toy=toy)
    attn_kernels.DENSE_T, attn_kernels.QUERY_BLOCK = settings


if __name__ == '__main__':
    main()
