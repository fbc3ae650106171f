"""GPN's steps on a CPU, in C: `CSteps` compiles gpn.c at first use and calls it with ctypes.

A step is a few products of few rows, and many small loops. As PyTorch operators, these take longer
to launch than to run, so a segment of steps is one call. On CPUs with bf16 units, the factors of
products can be bf16. Letters as in model_gpn.py.
"""
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F

from attn_kernels import outside_graphs

LIBRARY_DIR = Path(__file__).with_name('__pycache__')  # compiled libraries


@functools.cache
def build(dtype):
    """Compile gpn.c for this machine and dtype, or return None (no C compiler or bf16 units)."""
    # the math flags let sums vectorize; unlike -ffast-math, they keep NaN and infinity
    command = [*shlex.split(os.environ.get('CC', 'cc')), '-O3', '-march=native', '-fno-math-errno', '-fno-signed-zeros',
               '-fno-trapping-math', '-fassociative-math', '-shared', '-fPIC']
    command += {torch.float64: ['-DDOUBLE'], torch.bfloat16: ['-DBF16']}.get(dtype, [])
    library = _library([*command, '-fopenmp']) or _library(command)  # with OpenMP if available
    if library is not None:
        real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
        # struct `sizes` of gpn.c, in its order
        fields = [(name, ctypes.c_long) for name in (*'SBCFHKDL', 'threads', 'keep')]
        fields += [(name, real) for name in ('state_eps', 'read_eps', 'key_eps')]
        library.Numbers = type('Numbers', (ctypes.Structure,), {'_fields_': fields})
    return library


def _library(command):
    """Compile gpn.c (1 to 2 s), or load it from LIBRARY_DIR, keyed by a hash of its inputs."""
    source = Path(__file__).with_name('gpn.c')
    try:
        # predefined macros include the compiler's version and this CPU's features
        macros = subprocess.run([*command, '-dM', '-E', '-x', 'c', os.devnull], capture_output=True, check=True).stdout
        name = f'gpn-{hashlib.sha256(repr([source.read_bytes(), command, macros]).encode()).hexdigest()}.so'
        with suppress(OSError):  # missing or damaged
            return ctypes.CDLL(LIBRARY_DIR / name)
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, name)
            subprocess.run([*command, source, '-o', built, '-lm'], capture_output=True, check=True)
            library = ctypes.CDLL(built)
            with suppress(OSError):  # the folder is not writable
                LIBRARY_DIR.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory(dir=LIBRARY_DIR) as beside:
                    os.replace(shutil.copy(built, beside), LIBRARY_DIR / name)
            return library
    except OSError:
        return None
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors='replace')
        if 'gpn.c:' in message and 'no bf16 units' not in message and '-fopenmp' not in command:  # after an edit
            print(message, file=sys.stderr)
        return None


@outside_graphs
def c_dtype(dtype):
    """Return the dtype of products: fp32 replaces fp16, and bf16 on CPUs without bf16 units."""
    return dtype if dtype == torch.float64 or dtype == torch.bfloat16 and build(dtype) else torch.float32


def pointers(x):
    """Convert a tensor, None, an int, or a list of them to a ctypes argument."""
    if isinstance(x, list):
        return (ctypes.c_void_p * len(x))(*map(pointers, x))
    return ctypes.c_long(x) if isinstance(x, int) else ctypes.c_void_p(None if x is None else x.data_ptr())


class CSteps:
    """Steps of a segment with the weights from `fold`. backward: they are for `backward` only."""

    def __init__(self, folded, sizes, norm_eps, dtype, backward=False):
        self.library, self.sizes = build(dtype), sizes
        weights, wide = [x.detach() for x in folded[:-2]], torch.promote_types(dtype, torch.float32)
        self.rate, self.first_key = (x.detach().to(wide) for x in folded[-2:])
        if backward:
            weights = [w.T if w.dim() == 2 else None for w in weights]  # gradients need W^T and no bias
        panels = [w if w is None else w.to(wide).contiguous() if w.dim() == 1 else self._panels(w.to(dtype))
                  for w in weights]
        self.weights = [*panels, self.rate, self.first_key]  # keeps them alive: C has only their addresses
        self.pointers = pointers(self.weights)
        self.numbers = self.library.Numbers(0, 0, *sizes[:6], 0, 0, *sizes.eps(norm_eps))

    def _panels(self, weight):
        """Zero-pad weight (n, c) and return its tiles: (n / width, c / pair, width, pair)."""
        width, pair = (ctypes.c_int.in_dll(self.library, name).value for name in ('panel', 'pair'))
        whole = F.pad(weight, (0, -weight.shape[1] % pair, 0, -len(weight) % width))
        return whole.unflatten(0, (-1, width)).unflatten(2, (-1, pair)).transpose(1, 2).contiguous()

    def _call(self, function, u, *arguments):
        """Call a C function with sizes, weights and arguments. u: for S, B and dtype."""
        assert u.dtype == self.rate.dtype, f'{u.dtype} with weights of {self.rate.dtype}'
        self.numbers.S, self.numbers.B, self.numbers.threads = *u.shape[:2], torch.get_num_threads()
        function(ctypes.byref(self.numbers), self.pointers, *map(pointers, arguments))

    def steps(self, s, k, memory, u, carry=None, active=None):
        """See `KernelSteps.steps`. s, k, memory are contiguous: C updates them at their address."""
        u, carry, active = (x if x is None else x.contiguous() for x in (u, carry, active))
        self.numbers.keep = len(s) > 1
        widths = [self.sizes.n_embd] * self.sizes.n_layer + self.sizes.saved_widths()
        outputs = [u.new_empty(*u.shape[:2], width) for width in widths]
        self._call(self.library.steps, u, s, k, memory, u, carry, active, outputs)
        return s, k, memory, outputs

    def backward(self, u, carry, start, grads, saved, is_cut):
        """See `KernelSteps.backward`."""
        (S, B, _), c, (grad, *later) = u.shape, self.sizes, grads
        du, (ds, dk, dm) = torch.empty_like(u), (x.clone() for x in later)
        inner, products = saved[:c.n_layer - 1], saved[c.n_layer - 1:]
        saved = [x.contiguous() for x in (*inner, u, *products)]  # u: placeholder for the last states, not read
        drate, dfirst, memories = u.new_zeros(B, c.n_head), torch.zeros_like(dk), u.new_empty(S, *dm.shape)
        widths = [c.n_embd, c.n_embd]
        for layer in range(c.n_layer):
            widths += [sum(c.columns(layer)), c.n_embd, c.n_embd, c.n_ffn + c.n_head * c.d_v]
        pairs = [u.new_empty(S, B, width) for width in widths]
        inputs = [x if x is None else x.contiguous() for x in (u, carry, *start, grad)]
        self._call(self.library.steps_backward, u, int(is_cut), *inputs, ds, dk, dm, saved, memories, du, drate, dfirst,
                   pairs)
        return du, ds, dk, dm, drate.sum(0), dfirst.sum(0), list(zip(pairs[::2], pairs[1::2]))
