"""Attention forward and backward passes, compared with PyTorch's own calls.

    python -m bench.attention [--toy]

The patterns are `sees` of model_standard and model_sps: causal, a window of 64, and SPS with window
64, each with and without documents. Ours runs in tiles on a CPU, and with FlexAttention or Triton
on a GPU, where ten calls are one CUDA graph, so that the time is that of the kernels. PyTorch's
side is `scaled_dot_product_attention` with a dense mask (not on a GPU) or is_causal=True. Useful
FLOPs count only visible query-key pairs: 14 D per pair and head, forward and backward.
"""
import itertools
from collections.abc import Iterator
from functools import partial

import torch

import model_sps
import model_standard
from attn_kernels import Mask, _whole_mask, attention, dense_mask, document_starts, make_mask, sequence
from bench import DEVICE, GPU, Settings, alternate, measure
from common import gpu
from common.decoding import record_graph
from scans import attention as triton_kernels

N_HEAD, TOKENS, LENGTHS = (12, 16384, (4096, 1024)) if GPU else (8, 4096, (256, 1024, 2048))  # TOKENS: per call
CALLS = 10 if GPU else 1  # per timing
DTYPES = (torch.bfloat16,) if GPU else (torch.bfloat16, torch.float32)
PATTERNS = {  # name: (model file, Config values, key streams)
    'causal': (model_standard, dict(window=None), (0,)),
    'window': (model_standard, dict(window=64), (0,)),
    'sps': (model_sps, dict(window=64), (0, 1))}


def compare(pattern: str, documents: bool, T: int, dtype: torch.dtype, toy: bool) -> dict:
    """Return a row with the time of each side, absolute and relative to ours."""
    module, values, streams = PATTERNS[pattern]
    B, D = 2 if toy else max(1, TOKENS // (T * len(streams))), 64
    with torch.device('meta'):
        model = module.Model(module.Config(n_layer=1, n_head=N_HEAD, n_embd=N_HEAD * D, **values))
    ends = (torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 1 / 1000).long().to(DEVICE)
    doc_start = document_starts(ends, 1) if documents else None  # documents of 1000 tokens on average
    q, k, v = torch.randn(3, B, len(streams) * T, N_HEAD, D, device=DEVICE, dtype=dtype).requires_grad_().unbind(0)
    pairs = _whole_mask(model.sees, T, doc_start, streams, streams, DEVICE)
    masks = {'ours': make_mask(model, T, DEVICE, doc_start, streams)}
    if GPU:
        reaches = [model.w_x, model.w_rho] if len(streams) == 2 else [model.reach]
        masks['triton'] = triton_kernels.make_mask(T, DEVICE, doc_start, reaches)
    else:
        keys = sequence(T, streams, DEVICE)
        masks['dense mask'] = dense_mask(model, model.sees, sequence(T, streams, DEVICE, doc_start), keys)
    if pattern == 'causal':  # with documents, this side also computes pairs that the pattern excludes
        masks['is_causal'] = Mask('causal')
    grad = torch.randn_like(q)

    def call(mask):
        for _ in range(CALLS):
            torch.autograd.grad(attention(q, k, v, mask), (q, k, v), grad)
    sides = {name: partial(call, mask) for name, mask in masks.items()}
    if GPU:
        sides = {name: record_graph(side, undo=lambda: None).replay for name, side in sides.items()}
    seconds = {name: s / CALLS for name, s in alternate(sides, rounds=1 if toy else 5).items()}
    flops = 14 * D * N_HEAD * pairs.sum().item() * B / len(pairs)
    return {'pattern': pattern, 'documents': documents, 'dtype': str(dtype)[6:], 'T': T, 'D': D, 'batch': B,
            **{f'{name} ms': round(1e3 * s, 3) for name, s in seconds.items()},
            **{f'{name} over ours': round(s / seconds['ours'], 2) for name, s in seconds.items() if name != 'ours'},
            'useful TFLOP/s': round(flops / seconds['ours'] / 1e12, 3)}


def figures(s: Settings) -> Iterator[dict]:
    if GPU:
        gpu.set_compiler_options()
    for dtype, T in itertools.product(DTYPES, (32,) if s.toy else LENGTHS):
        for pattern, documents in itertools.product(PATTERNS, (False, True)):
            yield compare(pattern, documents, T, dtype, s.toy)
            torch.compiler.reset()  # so that each pattern is compiled for its own shapes


def main(argv: list[str] | None = None) -> None:
    measure(argv, attention=figures)


if __name__ == '__main__':
    main()
