"""Forms of one computation on a CPU: which of them is faster on the machine at hand, timed as it is needed.

`use_attention` for training, `pack_weights` and `choose_cache` for decoding. Two forms round differently, so all of
several processes take what the first of them found. config.json of a run has its attention, and decoding.json, beside
it, what was found for decoding (`Choices`): a run goes on, and a seed draws, as before. fp32 products of training:
common/matmul.py.
"""
import functools
import json
import platform
import time
import zlib
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import attn_kernels as K
from common.decoding import MANY_ROWS
from common.files import UserError, write_json
from common.machine import cpu_facts, is_faster, one_thread
from common.parallel import first_of_all, rank

PACKED_COUNTS = 1, 4, MANY_ROWS  # vectors in a product for which `packed_from` times both forms
SLOTS = 256  # of the cache that is read for timing
KEPT = 'decoding.json'  # in a run folder


# ---- training ----

def use_attention(name: str, device: str, dtype: torch.dtype, T: int) -> str:
    """Chooses the attention of this process where no key is skipped, and returns it: 'tiles' or 'fused'.

    name: one of these, or 'auto', the faster one here for windows of T tokens. It is chosen in bf16 on a CPU, for
    windows of at most `DENSE_T` tokens; elsewhere name comes back as it is. UserError for another name.
    """
    if name not in ('auto', 'tiles', 'fused'):
        raise UserError(f"attention is {name!r}: expected 'auto', 'tiles' or 'fused'")
    if device != 'cpu' or dtype != torch.bfloat16 or T > K.DENSE_T:
        return name
    if name == 'auto':
        name = first_of_all('fused' if _fused_is_faster(T) else 'tiles')
    K.tiles_in_bf16 = name == 'tiles'
    return name


def _fused_is_faster(T: int) -> bool:
    """On one thread, in its own processor time, which other programs leave alone. 0.1 s for T = 1024."""
    def training(in_tiles):
        def step(x):
            K.tiles_in_bf16 = in_tiles
            K.attention(x, x, x).sum().backward()
        return step
    x = torch.ones(1, T, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    with one_thread():
        return is_faster(training(False), training(True), x, clock=time.thread_time)


# ---- decoding ----

class Choices:
    """What was faster on this machine. A run folder keeps it: timed again, it might come out otherwise."""

    def __init__(self, folder=None):
        """folder: of a run; None keeps nothing. With several processes all come here; the first one counts."""
        self.path = None if folder is None else Path(folder) / KEPT
        self.of_machines, machine = first_of_all((_read_notes(self.path), this_machine()))
        self.known = self.of_machines.setdefault(machine, {})
        self.is_new = False

    @torch.no_grad()  # as decoding runs: the plain weight's graph would be timed too
    def is_faster(self, question: str, f, g, x) -> bool:
        """`machine.is_faster`, asked once. With several processes all ask, and the first one's answer holds."""
        if question not in self.known:
            self.known[question] = first_of_all(is_faster(f, g, x, seconds=0.01))
            self.is_new = True
        return self.known[question]

    def keep(self) -> None:
        """Writes what is new to the run folder, if that can be written to."""
        if self.path and self.is_new and rank() == 0:
            with suppress(OSError):  # others' folder: timed again at the next start
                write_json(self.path, self.of_machines)


def _read_notes(path: Path | None) -> dict[str, dict[str, bool]]:
    """{machine: {question: answer}}; nothing where the file is not there or no such notes: all is timed again then."""
    try:
        notes = json.loads(path.read_bytes()) if path else {}
        is_right = all(type(answer) is bool for known in notes.values() for answer in known.values())
    except (OSError, ValueError, AttributeError):
        return {}
    return notes if is_right else {}


def this_machine() -> str:
    """The processor with what it can do, the threads, and PyTorch."""
    facts = cpu_facts()
    return (f'{facts.pop("model name", platform.processor() or platform.machine())} '
            f'{zlib.crc32(str(facts).encode()):08x}, {torch.get_num_threads()} threads, torch {torch.__version__}')


def pack_weights(model: nn.Module, choices: Choices | None = None) -> nn.Module:
    """Stores the weights of linear layers in the layout of the CPU's matrix units, where this PyTorch can.

    By private operators, in place, for inference only. Decoding is bound by reading weights, and this reads them in
    order. The plain weights stay beside the packed ones, for products of few vectors: by machine, shape and dtype these
    may be faster plain, which is timed here, once for each shape of layer, unless it is known. With several processes
    all must come here.
    """
    choices = choices or Choices()
    choose_cache(model, choices)
    if getattr(model, 'scan_report', 0) is None:
        model.choose_scan()  # packed weights cannot be exchanged for those of the check
    reorder = getattr(torch.ops.mkldnn, '_reorder_linear_weight', None)
    if reorder is None or not torch.backends.mkldnn.is_available():
        return model
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == 'cpu':
            plain = functools.partial(F.linear, weight=module.weight, bias=module.bias)
            try:
                packed = _packed_linear(module, reorder(module.weight.detach()))
                packed(torch.zeros(1, module.in_features, dtype=module.weight.dtype))
            except RuntimeError:  # this dtype has no such operator here
                break
            count = packed_from(plain, packed, module.weight, choices)
            if count is not None:
                module.forward = packed if count == 1 else _by_count(plain, packed, count)
    return model


def _packed_linear(module, weight):
    """The forward of a linear layer whose weight is packed."""
    bias = module.bias
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


def _by_count(plain, packed, count):
    """The forward of a linear layer that multiplies fewer than `count` vectors by its plain weight."""
    return lambda x: (packed if x.numel() >= count * x.shape[-1] else plain)(x)


def packed_from(plain, packed, weight, choices: Choices) -> int | None:
    """The fewest vectors, of PACKED_COUNTS, that a layer does not multiply faster plain; None: it always does."""
    N, n_in = weight.shape
    for count in PACKED_COUNTS:
        question = f'{count} vectors by {N} x {n_in} in {str(weight.dtype)[6:]}: plain before packed'
        if not choices.is_faster(question, plain, packed, torch.ones(count, 1, n_in, dtype=weight.dtype)):
            return count
    return None


def choose_cache(model: nn.Module, choices: Choices) -> None:
    """How a bf16 model's cache is kept and read on a CPU; nothing for others.

    Whether one in bf16 is read by PyTorch's fused attention or by plain products, for all models alike; and whether one
    in fp32 is faster, for one row and for MANY_ROWS.
    """
    c, weight = getattr(model, 'config', None), next(model.parameters())
    heads, size = getattr(c, 'n_head', None), getattr(c, 'head_size', None)
    if weight.device.type != 'cpu' or weight.dtype != torch.bfloat16 or not (heads and size):
        return

    def reading(rows, heads, key_heads, size, dtype, by_products):
        """The queries (rows, 1, heads, size) read a cache of this dtype."""
        k, v = torch.ones(2, rows, key_heads, SLOTS, size, dtype=dtype)
        seen = torch.ones(rows, 1, SLOTS, dtype=torch.bool)

        def read(q):
            K.products_over_slots = by_products
            K.slot_attention(q, k, v, seen)
        return read, torch.ones(rows, 1, heads, size, dtype=torch.bfloat16)

    (fused, q), (products, _) = (reading(1, 8, 8, 64, torch.bfloat16, by_products) for by_products in (False, True))
    by_products = not choices.is_faster('a bf16 cache: fused attention before products', fused, products, q)
    key_heads, model.cache_in_fp32 = getattr(c, 'n_kv_head', None) or heads, {}
    for rows in 1, MANY_ROWS:
        (in_fp32, q), (in_bf16, _) = (reading(rows, heads, key_heads, size, dtype, by_products)
                                      for dtype in (torch.float32, torch.bfloat16))
        question = f'{rows} rows of {heads} heads of {size}, {key_heads} of keys: a cache in fp32 before bf16'
        model.cache_in_fp32[rows] = choices.is_faster(question, in_fp32, in_bf16, q)
    K.products_over_slots = by_products
