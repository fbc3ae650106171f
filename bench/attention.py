"""Attention forward and backward passes, compared with PyTorch's own calls.

    python -m bench.attention [--toy]

The patterns are `sees` of model_standard and model_sps: causal, a window of 64, and SPS with window
64, each with and without documents. Ours runs in tiles on a CPU, and with FlexAttention or Triton
on a GPU, where ten calls are one CUDA graph, so that the time is that of the kernels. PyTorch's
side is `scaled_dot_product_attention` with a dense mask (not on a GPU) or is_causal=True. Useful
FLOPs count only visible query-key pairs: 14 D per pair and head, forward and backward.
"""
import functools
from collections.abc import Iterator

import torch

import model_sps
import model_standard
from attn_kernels import Mask, _whole_mask, attention, dense_mask, document_starts, make_mask, sequence
from bench import DEVICE, GPU, alternate, graphed, measure
from lm_architectures.machine import compiling
from scans import attention as triton_kernels

N_HEAD, TOKENS, WINDOW = (12, 16384, 64) if GPU else (8, 4096, 64)  # TOKENS: per call
LENGTHS = (4096, 1024) if GPU else (256, 1024, 2048)
DTYPES = (torch.bfloat16,) if GPU else (torch.bfloat16, torch.float32)
PATTERNS = {  # name: (model file, Config values, key streams)
    'causal': (model_standard, dict(window=None), (0,)),
    'window': (model_standard, dict(window=WINDOW), (0,)),
    'sps': (model_sps, dict(window=WINDOW), (0, 1))}


def compare(pattern: str, documents: bool, T: int, D: int, dtype, rounds: int) -> dict:
    """Return a row with the time of each side, absolute and relative to ours."""
    module, values, streams = PATTERNS[pattern]
    with torch.device('meta'):
        model = module.Model(module.Config(n_layer=1, n_head=N_HEAD, n_embd=N_HEAD * D, **values))
    B = 2 if rounds == 1 else max(1, TOKENS // (T * len(streams)))
    ends = (torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 1 / 1000).long().to(DEVICE)
    doc_start = document_starts(ends, 1) if documents else None  # documents of 1000 tokens on average
    q, k, v = torch.randn(3, B, len(streams) * T, N_HEAD, D, device=DEVICE, dtype=dtype).requires_grad_().unbind(0)
    pairs = _whole_mask(model.sees, T, doc_start, streams, streams, DEVICE)
    n_pairs = pairs.sum().item() * B / len(pairs)
    sides = {'ours': make_mask(model, T, DEVICE, doc_start, streams)}
    if GPU:
        reaches = [model.w_x, model.w_rho] if len(streams) == 2 else [model.reach]
        sides['triton'] = triton_kernels.make_mask(T, DEVICE, doc_start, reaches)
    else:
        keys = sequence(T, streams, DEVICE)
        sides['dense mask'] = dense_mask(model, model.sees, sequence(T, streams, DEVICE, doc_start), keys)
    if pattern == 'causal':  # with documents, this side also computes pairs that the pattern excludes
        sides['is_causal'] = Mask('causal')
    grad, calls = torch.randn_like(q), 10 if GPU else 1

    def call(mask):
        torch.autograd.grad(attention(q, k, v, mask), (q, k, v), grad)
    calls_of = {name: functools.partial(call, mask) for name, mask in sides.items()}
    if GPU:
        calls_of = {name: graphed(function, calls) for name, function in calls_of.items()}
    seconds = {name: s / calls for name, s in alternate(calls_of, rounds).items()}
    return {'pattern': pattern, 'documents': documents, 'dtype': str(dtype)[6:], 'T': T, 'D': D, 'batch': B,
            **{f'{name} ms': round(1e3 * s, 3) for name, s in seconds.items()},
            **{f'{name} over ours': round(s / seconds['ours'], 2) for name, s in seconds.items() if name != 'ours'},
            'useful TFLOP/s': round(14 * D * N_HEAD * n_pairs / seconds['ours'] / 1e12, 3)}


def figures(toy: bool) -> Iterator[dict]:
    for dtype in DTYPES:
        for T in (32,) if toy else LENGTHS:
            for pattern in PATTERNS:
                for documents in (False, True):
                    yield compare(pattern, documents, T, 64, dtype, rounds=1 if toy else 5)
                    if GPU:
                        torch.compiler.reset()


def main(argv: list[str] | None = None) -> None:
    if GPU:
        compiling.set_compiler_options()
    measure(argv, attention=figures)


if __name__ == '__main__':
    main()
