"""The fast forms of attn_kernels.py, compared with what defines them before their first use.

`check_operators`: those in PyTorch's operators. Where one place alone is edited, as `visible`, the definition trains.
`check_kernels`: then the Triton kernels, on the device where they are to run. Compilers have got kernels wrong on new
GPUs, and training went on in silence; what is wrong there, PyTorch's own operators do instead.
KERNEL_CHECK=0 in the environment leaves the checks out.
"""
import functools
import inspect
import math
import os
import sys
import time

import torch

import attn_kernels as K
from common.machine import one_thread
from common.parallel import of_all, rank

KERNEL_CHECK = os.environ.get('KERNEL_CHECK') != '0'

# The largest difference that is rounding: of a row of a result, relative to the row. In the interpreter fp32 shows
# 3e-6 and fp16 2e-3; bf16 has three bits less than fp16.
KERNEL_TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 0.06}

# of attn_kernels.py: what its fast forms are compared with, and what these call
DEFINITIONS = ('visible', 'two_stream_visible', 'stream_windows', 'document_starts', '_dense_attention', '_rms_norm',
               'rope_table', '_rotate', 'linear_cross_entropy_reference', 'linear_cross_entropy_kl_reference')


def definitions() -> list[str]:
    """The source of each of DEFINITIONS that is there."""
    return [inspect.getsource(getattr(K, name)) for name in DEFINITIONS if hasattr(K, name)]


@functools.cache
def check_kernels(device, dtype, head_size=None, group=1, persistent=None):
    """Compares the kernels of loss, norm, attention and decoding with their references: what is wrong is not used.

    device: torch.device; dtype: of queries, keys and values; head_size: None for a model without attention; group:
    query heads for each key head; persistent: for attention of two streams, which of them has no window, as in
    `stream_windows`; None: attention of one. Call it before torch.compile.

    A line on stderr says what was found, or what is refused, what runs instead and what to report. Returns
    {'loss', 'norm', 'attention' or 'decoding': why it is refused}; None where no kernel runs, or with KERNEL_CHECK=0.
    It is done once in a process, after `check_operators`. With several processes all must come here, and what one
    refuses none uses.
    """
    if KERNEL_CHECK and not K.REFERENCE and not K.KERNELS_ON_CPU:  # where these run in place of the operators
        check_operators(has_attention=head_size is not None)
    has_kernels = K.triton is not None and (device.type == 'cuda' or K.KERNELS_ON_CPU) and dtype != torch.float64
    if not KERNEL_CHECK or K.REFERENCE or not has_kernels:
        return None
    start, largest, failed = time.perf_counter(), 0.0, {}
    case = device, dtype, head_size, group, persistent
    checks = {'loss': _loss_differences, 'norm': _decoding_norm_differences}
    if head_size is not None and head_size <= 128:
        checks |= {'attention': _attention_differences, 'decoding': _decoding_differences}
    for name, differences in checks.items():
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
                found = differences(*case)
        except Exception as error:  # of Triton's compiler, for one
            failed[name] = f'fails ({_first_line(error)})'
            continue
        where = max(found, key=found.get)
        largest = max(largest, found[where])
        if found[where] > KERNEL_TOLERANCE[dtype]:
            failed[name] = f'differs from its reference by {found[where]:.1%} of a row in {where}'
    failed = {name: why for of_one in of_all(failed) for name, why in of_one.items()}
    K.refused.update(failed)
    _say_what_was_found(failed, checks, largest, time.perf_counter() - start, *case)
    return failed


def _say_what_was_found(failed, checks, largest, seconds, device, dtype, head_size, group, persistent):
    """A line on stderr for each kernel refused, or one that all are right."""
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else "Triton's interpreter"
    case = str(dtype)[6:] if head_size is None else f'{str(dtype)[6:]}, heads of {head_size}'
    if not failed:
        _say(f'kernels: {", ".join(checks)} equal their references on {where} ({case}), differences up to '
             f'{largest:.1g} of a row; checked in {seconds:.1f} s')
    for name, why in failed.items():
        arch = ' sm_{}{}'.format(*torch.cuda.get_device_capability(device)) if device.type == 'cuda' else ''
        _say(f"kernels: {name} {why} on {where}. PyTorch's own operators run instead, slower. Please report this "
             f'line: {case}, {group} query heads for a key head, persistent stream {persistent},{arch} PyTorch '
             f'{torch.__version__}, Triton {K.triton.__version__}. KERNEL_CHECK=0 in the environment skips the check')


@functools.cache
def check_operators(has_attention=True):
    """Compares PyTorch's forms of attention, loss, norm and rotation with what defines them, forward and backward.

    On the CPU, in fp32, in 60 ms. The definition of attention is `attention_reference`, with `visible`; of the loss the
    one with all logits in memory; of the gradients of norm and rotation, which are written by hand, autograd's of the
    forward. What differs, as after an edit of one place alone, is not used from then on, and a line on stderr says so.
    Returns {name: why}.
    """
    checks = {'loss': _loss_differences, 'norm': _norm_differences, 'rotation': _rotation_differences}
    if has_attention:
        checks['attention'] = _tile_differences
    failed = {}
    for name, differences in checks.items():
        try:
            with one_thread(), torch.inference_mode(False), torch.enable_grad(), torch.autocast('cpu', enabled=False):
                found = differences(torch.device('cpu'), torch.float32)
        except Exception as error:  # an edit that the comparison cannot follow, as another signature
            _say(f'attn_kernels: {name} cannot be compared with its definition ({_first_line(error)})')
            continue
        where = max(found, key=found.get)
        if found[where] > KERNEL_TOLERANCE[torch.float32]:
            failed[name] = f'differs from its definition by {found[where]:.1%} of a row in {where}'
            _say(f'attn_kernels: the fast form of {name} {failed[name]}. The definition runs instead, slower. After an '
                 'edit of it that is as it should be; to be fast again, the fast form needs the same')
    K.refused.update(failed.keys() - {'attention'})
    K.REFERENCE = K.REFERENCE or 'attention' in failed
    return failed


def _say(line):
    """A line on stderr, of the first process."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _first_line(error):
    return f'{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}'


def _row_difference(got, want):
    """The largest difference of a row (the last axis), relative to the row, or to a typical one where that is more."""
    size = torch.linalg.vector_norm(want, dim=-1)
    typical = size.square().mean().sqrt().clamp(min=1e-30)
    apart = torch.linalg.vector_norm(got.double() - want, dim=-1) / size.maximum(typical)
    return apart.nan_to_num(math.inf, math.inf).max().item()


def _differences_with_gradients(fast, reference, inputs, names):
    """{name: `_row_difference`} of the output and the gradient of each input; the reference in float64."""
    results = []
    for function, dtype in ((fast, inputs[0].dtype), (reference, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
        cotangent = (40 * weights).sin().view(out.shape).to(inputs[0].dtype).to(dtype)
        # a sum, as the cotangent as an argument of its own would import a second's worth of PyTorch
        results.append([out, *torch.autograd.grad((out * cotangent).sum(), leaves)])
    return {name: _row_difference(got.detach(), want.detach()) for name, got, want in zip(names, *results)}


def _loss_differences(device, dtype, *_):
    """Of `linear_cross_entropy`, by rows' weights too, and `linear_cross_entropy_kl`, and of their gradients.

    In several parts, some rows without a target.
    """
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(3, 300, 64, device=device, generator=generator).to(dtype)
    weight = (torch.randn(400, 64, device=device, generator=generator) / 8).to(dtype)
    targets = torch.randint(-1, 400, (300,), device=device, generator=generator)
    row_weights = torch.rand(300, device=device, generator=generator)
    counts = targets.expand(2, -1) % 3 > 0

    def differences(kind, row_weights=None, counts=None, head_frozen=True):
        def fast(states, weight):
            nll, kl = K._fused_losses(states, weight, targets, row_weights, counts, head_frozen, 256 * 400)
            return nll.view(1, 1) if counts is None else torch.stack([nll, kl]).unsqueeze(1)

        def reference(states, weight):
            if counts is None:
                return K.linear_cross_entropy_reference(states[0], weight, targets, row_weights).view(1, 1)
            losses = K.linear_cross_entropy_kl_reference(states, weight, targets, counts, head_frozen)
            return torch.stack(losses).unsqueeze(1)
        names = [f'{name}{kind}' for name in ('the loss', 'the gradient of the hidden states',
                                              'the gradient of the head')]
        inputs = states[:1] if counts is None else states, weight
        return _differences_with_gradients(fast, reference, inputs, names)
    return (differences('') | differences(", by rows' weights", row_weights)
            | differences(' with KL, head frozen', counts=counts)
            | differences(' with KL, head trained', counts=counts, head_frozen=False))


def _norm_differences(device, dtype):
    """Of `rms_norm` and its gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((9, 24), (24,)))
    return _differences_with_gradients(lambda x, weight: K.rms_norm(x, weight, 1e-3),
                                       lambda x, weight: K._rms_norm(x, weight, 1e-3, x.dtype)[0], [x, weight],
                                       ('the output', 'the gradient of x', 'the gradient of the weight'))


def _decoding_norm_differences(device, dtype, *_):
    """Of `rms_norm` as decoding calls it, without gradients."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(*shape, device=device, generator=generator).to(dtype) for shape in ((9, 320), (320,)))
    with torch.no_grad():
        got, want = K.rms_norm(x, weight, 1e-3), K._rms_norm(x.double(), weight.double(), 1e-3, torch.float64)[0]
    return {'the output': _row_difference(got, want)}


def _rotation_differences(device, dtype):
    """Of `rotate` and its gradient."""
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    table = K.rope_table(torch.arange(9, device=device), 8, 100.0)
    return _differences_with_gradients(lambda x: K.rotate(x, *table), lambda x: K._rotate(x, *table), [x],
                                       ('the output', 'the gradient'))


def _tile_differences(device, dtype):
    """Of attention of one stream and of two, and of its gradients: a whole window; documents and a window."""
    T = 2 * K.QUERY_ROWS + 40  # longer, and tiles skip keys
    x = torch.randn(1, 2, T, 3, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    q, k, v = x.split(1, -2)
    idx = torch.zeros(1, T, dtype=torch.int64, device=device)
    idx[:, [T // 8, T // 2]] = 1

    def differences(pattern, doc_start, window):
        def of_one(attend):
            return lambda q, k, v: attend(q[:, 0], k[:, 0], v[:, 0], doc_start, window)

        def of_two(attend, persistent):
            windows = K.stream_windows(persistent, window)
            return lambda q, k, v: attend(q, k, v, windows, doc_start)
        found = {}
        for streams, fast, reference in (
                ('one stream', of_one(K.attention), of_one(K.attention_reference)),
                *((f'two streams, {persistent} persistent', of_two(K.two_stream_attention, persistent),
                   of_two(K.two_stream_attention_reference, persistent)) for persistent in ('input', 'predict'))):
            names = [f'{name}, {streams}, {pattern}' for name in ('the output', 'dq', 'dk', 'dv')]
            found |= _differences_with_gradients(fast, reference, [q, k, v], names)
        return found
    return (differences('all of the past', None, None)
            | differences('documents and a window', K.document_starts(idx, 1), 20))


def _check_case(device, dtype, head_size, group, n_streams):
    """Random (B, T, streams, heads, D) and tokens (B, T) whose id 1 ends documents, and a window.

    T and the window are long enough that a walk has tiles of every kind: left, full and right ones.
    """
    passes = [K.tiles(device, head_size, dtype, kind, 1, group)
              for kind in ('forward', 'query_gradient', 'key_gradient')]
    largest = max(max(rows, keys) for rows, keys, *_ in passes)
    T, window = 5 * largest // 2 + 16, 3 * largest // 2 + 16  # multiples of 16, as a model's mostly are
    generator = torch.Generator(device).manual_seed(0)
    heads = 2 * group + 2 + 2  # queries, keys, values
    x = torch.randn(2, T, n_streams, heads, head_size, device=device, generator=generator).to(dtype)
    idx = torch.zeros(2, T, device=device, dtype=torch.int64)
    idx[0, [T // 8, T // 2]] = 1
    return x, idx, window


def _attention_differences(device, dtype, head_size, group, persistent):
    """Of attention with documents and a window, and of its gradients; with two streams also where one asks alone."""
    x, idx, window = _check_case(device, dtype, head_size, group, 2 if persistent else 1)
    doc_start, (q, k, v) = K.document_starts(idx, 1), x.transpose(1, 2).split([2 * group, 2, 2], -2)

    def differences(q, windows, queries, reference):
        def fast(q, k, v):
            return K._kernel_attention(q, k, v, doc_start, windows, K.STREAMS[queries][0])
        names = [f'{name}, {queries} asking' for name in ('the output', 'dq', 'dk', 'dv')]
        return _differences_with_gradients(fast, reference, [q, k, v], names)

    def two_streams_asking(queries):
        windows = K.stream_windows(persistent, window)
        return differences(q[:, K.STREAMS[queries]], windows, queries,
                           lambda q, k, v: K.two_stream_attention_reference(q, k, v, windows, doc_start, queries))

    if persistent:
        return two_streams_asking('both') | two_streams_asking('predict') | two_streams_asking('input')
    return differences(q, [window, None], 'input', lambda q, k, v: K.attention_reference(
        q[:, 0], k[:, 0], v[:, 0], doc_start, window).unsqueeze(1))


def _decoding_differences(device, dtype, head_size, group, persistent):
    """Of a step of one token and of one of four over a filled cache, and of what the cache then holds.

    The cache has room for several programs to share a row, and is in dtype, then in fp32, as under autocast.
    """
    x, idx, window = _check_case(device, dtype, head_size, group, 2 if persistent else 1)
    windows, ring_stream = [window], None
    if persistent:
        windows, ring_stream = K.stream_windows(persistent, window), 0 if persistent == 'predict' else 1
    T, room = idx.shape[1], max(idx.shape[1], 4 * K.DECODE_SHARE)

    def results(x, cache_dtype):
        cache = K.KVCache(1, 2, head_size, 2, room, 4, 1, windows, ring_stream, eos_id=1, device=device,
                          dtype=cache_dtype)
        outs = []
        for run in (slice(0, T - 5), slice(T - 5, T - 4), slice(T - 4, T)):
            place = cache.begin(idx[:, run])
            qk, v = x[:, run].split([2 * group + 2, 2], -2)
            qk, v = (x.transpose(1, 2) if persistent else x.squeeze(2) for x in (qk, v))
            q, k = place.rotate(qk).split([2 * group, 2], -2)
            outs.append(cache.attend(place, 0, q, k, v, 'both' if persistent else 'input'))
            cache.end(place, x.new_zeros(*idx[:, run].shape, 1))
        return *outs[1:], cache.k, cache.v
    names = 'a step', 'a step of four', 'the keys it stores', 'the values it stores'
    reference = results(x.double(), torch.float64)  # no kernel takes float64
    return {f'{name}, cache in {str(cache_dtype)[6:]}': _row_difference(got, want)
            for cache_dtype in dict.fromkeys((dtype, torch.float32))
            for name, got, want in zip(names, results(x, cache_dtype), reference)}
