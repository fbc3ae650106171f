"""Compile the Triton kernels for an H100 (no GPU needed) and print the resources each one uses.

    python tests/scans/kernel_resources.py attention
    python tests/scans/kernel_resources.py delta

One line per kernel and variant: name, dtype, variant, registers, bytes of stack (spills), bytes of
shared memory, and the number of wgmma instructions (16-bit tensor cores).
"""
import collections
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import scans
from scans import attention as K

TYPES = {torch.bfloat16: '*bf16', torch.float16: '*fp16', torch.float32: '*fp32', torch.float64: '*fp64',
         torch.int64: '*i64', int: 'i32', float: 'fp32'}
STREAMS = {  # (number of query streams, number of key streams, first query stream)
    'one': (1, 1, 0), 'both': (2, 2, 0), 'x alone': (1, 2, 0), 'rho alone': (1, 2, 1)}
VARIANTS = [  # attention: (streams, head size, dtype, query heads per key head)
    *((streams, D, torch.bfloat16, 1) for streams in STREAMS for D in (64, 128)),
    *((streams, D, torch.bfloat16, 4) for streams in ('one', 'both') for D in (64, 128)),
    ('both', 32, torch.bfloat16, 1), ('both', 64, torch.float16, 1),
    *(('both', D, torch.float32, group) for D, group in ((32, 1), (64, 1), (64, 4), (128, 1)))]


def compile_once(done, kernel, words, *args, **options):
    """Compile a kernel for launch arguments (meta tensors) and print its resources.

    done: variants compiled so far, which are skipped; words: what to print of this one.
    """
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, x) in enumerate(zip(kernel.params, args, strict=True)):
        is_tensor = isinstance(x, torch.Tensor)
        if parameter.is_constexpr or x is None or not is_tensor and x == 1:
            signature[parameter.name], constants[i,] = 'constexpr', x
            continue
        signature[parameter.name] = TYPES[x.dtype if is_tensor else type(x)]
        address = x.storage_offset() * x.itemsize if is_tensor else x
        if not isinstance(x, float) and address % 16 == 0:  # Triton specializes on it at launch
            attributes[i,] = [['tt.divisibility', 16]]
    key = (kernel.__name__, *words, *signature.values(), *constants.values())
    if key in done:
        return
    done.add(key)
    source = scans.triton.compiler.ASTSource(kernel, signature, constants, attributes)
    target = scans.triton.backends.compiler.GPUTarget('cuda', 90, 32)
    built = scans.triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        Path(file.name).write_bytes(built.asm['cubin'])
        cuobjdump = Path(scans.triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
        usage = subprocess.run([cuobjdump, '-res-usage', file.name], capture_output=True, text=True).stdout
    dtype = next(x.dtype for x in args if isinstance(x, torch.Tensor))
    print(kernel.__name__, dtype, *words, re.search(r'REG:(\d+)', usage)[1], re.search(r'STACK:(\d+)', usage)[1],
          built.metadata.shared, built.asm['ptx'].count('wgmma.mma_async'), sep=', ', flush=True)


def attention():
    B, T, H, done = 2, 4096, 8, set()
    kernels = {name: getattr(K, name) for name in ('_forward_kernel', '_query_gradient_kernel', '_key_gradient_kernel')}
    for streams, D, dtype, group in VARIANTS:
        for name, kernel in kernels.items():  # launching it, on any grid, only compiles it
            launch = functools.partial(compile_once, done, kernel, (streams, D, group))
            setattr(K, name, collections.defaultdict(lambda launch=launch: launch))
        NQ, NK, first = STREAMS[streams]
        q = torch.empty(B, NQ * T, H, D, dtype=dtype, device='meta')
        k = torch.empty(B, NK * T, H // group, D, dtype=dtype, device='meta')
        doc_start = torch.empty(B, T, dtype=torch.int64, device='meta')
        out, lse = K._forward(q, k, k, doc_start, [4096, 64, first])
        K._backward(out, q, k, k, doc_start, out, lse, [4096, 64, first])


def delta():
    """Compile the kernels of GPN's memory at the sizes in the paper."""
    from scans import delta
    done, B, H, K, D = set(), 2, 15, 128, 256
    for name in ('_forward_kernel', '_backward_kernel'):
        launch = functools.partial(compile_once, done, getattr(delta, name), ())
        setattr(delta, name, collections.defaultdict(lambda launch=launch: launch))
    memory, k, v, beta = (torch.empty(B, H, *sizes, device='meta') for sizes in ((K, D), (K,), (D,), ()))
    delta.forward(memory, k, v, beta, beta, k)
    delta.forward(memory, k, v, beta, beta, None)
    delta.backward(memory, v, memory, k, v, beta, beta, k)


if __name__ == '__main__':
    {'attention': attention, 'delta': delta}[sys.argv[1]]()
