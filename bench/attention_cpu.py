"""Attention on CPU: tiles of dense products beside PyTorch's fused kernel, in one stream and in two.

Decides where `attention` in attn_kernels.py takes which, and `QUERY_ROWS`. Probabilities kept for the backward are
compared with computing them again, which past `DENSE_T` saves memory. Two streams, window 64: the library's side is one
call with a mask over the keys of both. The masks of documents are made before, as layers share them, but for 'masks
made again'. Also, for decoding, a cache in bf16 beside one in fp32, and its plain products beside the fused kernel.
"""
import torch
import torch.nn.functional as F

import attn_kernels
from bench import alternate, options, write_results

H, D, TOKENS = 8, 64, 4096  # heads, head size, tokens per call


def training(T, documents, dtype, form, rows=128, keep=True, share=True):
    """A forward and backward pass of one stream ('tiles' or 'fused'), or of two ('two streams', 'one call')."""
    two, window = form in ('two streams', 'one call'), 64
    B = max(1, TOKENS // (2 * T if two else T))
    q, k, v = torch.randn(3, B, 1 + two, T, H, D, dtype=dtype).requires_grad_().unbind(0)
    doc_start = (torch.arange(T) // 300 * 300).expand(B, T) if documents else None
    windows, position = [None, window] if two else [None], torch.arange(T)
    plain = doc_start is None and not two
    if two:
        seen = attn_kernels.two_stream_visible(position, position, position, windows, doc_start)
    else:
        seen = attn_kernels.visible(position, position, doc_start)
    mask = None if plain else attn_kernels._additive_mask(seen, dtype)

    def tiles():
        if documents and not share:
            vars(doc_start).clear()
        attn_kernels.DENSE_T, attn_kernels.QUERY_ROWS = T if keep else 0, rows
        attn_kernels._tiled_attention(q, k, v, windows, doc_start, 'both' if two else 'input').sum().backward()

    def fused():
        q_all, k_all, v_all = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
        F.scaled_dot_product_attention(q_all, k_all, v_all, mask, is_causal=plain).sum().backward()
    return fused if form in ('fused', 'one call') else tiles


def decoding(batch_size, dtype, fused=False, length=512):
    q = torch.randn(batch_size, 1, H, D, dtype=torch.bfloat16)
    cache = torch.randn(2, batch_size, H, length, D, dtype=dtype)
    mask = torch.ones(batch_size, 1, 1, length, dtype=torch.bool)
    if fused:
        return lambda: F.scaled_dot_product_attention(q.transpose(1, 2), *cache, attn_mask=mask)
    return lambda: attn_kernels.slot_attention(q, *cache, mask[:, 0])


def figures(toy):
    """The rows: training with one stream, with two, decoding."""
    forms = {'tiles_of_128_rows': {}, 'tiles_of_256_rows': dict(rows=256), 'computed_again': dict(keep=False),
             'masks_made_again': dict(share=False)}
    for ours, library in ('tiles', 'fused'), ('two streams', 'one call'):
        for dtype in (torch.bfloat16, torch.float32):
            for T in (32,) if toy else (256, 1024, 2048):
                for documents in (False, True):
                    sides = {name: training(T, documents, dtype, ours, **form) for name, form in forms.items()}
                    sides['library'] = training(T, documents, dtype, library)
                    seconds = alternate(sides, rounds=1 if toy else 3)
                    yield {'pass': f'training, {ours}', 'dtype': str(dtype)[6:], 'T': T, 'documents': documents,
                           **{f'{name}_over_{library.replace(" ", "_")}_speed': round(seconds['library'] / s, 2)
                              for name, s in seconds.items() if name != 'library'}}
    for batch_size in (1, 8, 16):
        sides = {'bfloat16': (torch.bfloat16,), 'float32': (torch.float32,), 'fused': (torch.bfloat16, True)}
        functions = {name: decoding(batch_size, *side) for name, side in sides.items()}
        seconds = alternate(functions, rounds=1 if toy else 50)
        yield {'pass': 'decoding', 'batch': batch_size,
               'bf16_over_fp32_cache_speed': round(seconds['float32'] / seconds['bfloat16'], 2),
               'bf16_products_over_fused_speed': round(seconds['fused'] / seconds['bfloat16'], 2)}


def main(argv=None):
    toy = '--toy' in options(argv, '--toy')
    settings = attn_kernels.DENSE_T, attn_kernels.QUERY_ROWS
    write_results('attention_forms', figures(toy), toy=toy)
    attn_kernels.DENSE_T, attn_kernels.QUERY_ROWS = settings


if __name__ == '__main__':
    main()
