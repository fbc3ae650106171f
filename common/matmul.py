"""fp32 matrix products on a CPU: by PyTorch's BLAS, or by oneDNN, which PyTorch has for its bf16 products.

On x86 the BLAS is MKL, which leaves half of an AMD processor's vector units idle: on Zen 5 a training step of 8 layers
of 512 takes 0.57 of its time with oneDNN (`python -m bench.train_step float32`). On Intel's it uses them.
"""
import functools
import time
import warnings

import torch

from common.files import UserError
from common.machine import is_faster, one_thread
from common.parallel import first_of_all

SMALLEST = 2 ** 20  # multiplications of a product that oneDNN is given: it takes 10 us to start
_chosen = 'blas'


def use_matmul(name: str, device: str, dtype: torch.dtype) -> str:
    """Chooses what multiplies fp32 matrices in this process from now on, and returns it: 'blas' or 'onednn'.

    name: one of these, or 'auto', the faster one here. It is timed, in 10 ms, by the first of several processes, as
    both round differently. On a GPU, or for products in another dtype, name comes back as it is. UserError for another
    name, or where PyTorch has no oneDNN.
    """
    global _chosen
    if name not in ('auto', 'blas', 'onednn'):
        raise UserError(f"matmul is {name!r}: expected 'auto', 'blas' or 'onednn'")
    if device != 'cpu' or dtype != torch.float32:
        return name
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.library, 'get_kernel')
    if name == 'auto':
        name = first_of_all('onednn' if has_onednn and _onednn_is_faster() else 'blas')
    if name == 'onednn':
        if not has_onednn:
            raise UserError('matmul is onednn, which this PyTorch does not have: use --matmul=auto')
        _replace_products()
    _chosen = name
    return name


@functools.cache
def _replace_products():
    """Puts torch.mm and torch.addmm on a CPU, of nn.Linear and of its gradients too, through `_mm` and `_addmm`."""
    library = torch.library.Library('aten', 'IMPL')
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Warning only once for all operators', UserWarning)
        for name, with_onednn in (('mm', _mm), ('addmm', _addmm)):
            blas = torch.library.get_kernel(f'aten::{name}', 'CPU')
            library.impl(name, functools.partial(with_onednn, blas), 'CPU', with_keyset=True, allow_override=True)
    return library  # as long as it lives, its operators do


def _mm(blas, keys, a, b):
    """aten::mm: a (m, k), b (k, n) -> (m, n)."""
    if _is_for_onednn(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, 'none', [], '')
    return blas.call_boxed(keys, a, b)


def _addmm(blas, keys, bias, a, b, *, beta=1, alpha=1):
    """aten::addmm: beta bias + alpha a b, bias (n,), (m, n) or what broadcasts to it."""
    if beta == alpha == 1 and bias.dtype == torch.float32 and _is_for_onednn(a, b):
        return _mm(blas, keys, a, b).add_(bias)
    return blas.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)


def _is_for_onednn(a, b) -> bool:
    return (_chosen == 'onednn' and a.dtype == b.dtype == torch.float32 and a.numel() * b.shape[-1] >= SMALLEST
            and _is_whole(a) and _is_whole(b))


def _is_whole(x) -> bool:
    """Whether x is a matrix whose rows, or columns, lie whole one after the other, as oneDNN needs."""
    (m, n), (rows, columns) = x.shape, x.stride()
    return columns == 1 and rows >= n or rows == 1 and columns >= m


def _onednn_is_faster() -> bool:
    """On one thread, in its own processor time, which other programs leave alone."""
    with one_thread():
        return is_faster(_by_onednn, _by_blas, torch.ones(256, 256), share=0.75, seconds=0.01, clock=time.thread_time)


def _by_blas(x):
    """A product (n, n) for timing."""
    return torch.mm(x, x, out=torch.empty_like(x))  # which `_replace_products` leaves alone


def _by_onednn(x):
    return torch.ops.mkldnn._linear_pointwise(x, x.t(), None, 'none', [], '')
