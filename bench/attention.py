"""The Triton attention kernels on a GPU beside PyTorch's fused attention and compiled FlexAttention.

    python -m bench.attention           time, useful TFLOP/s, memory and tiles by pattern and length
    python -m bench.attention --tune    times tile sizes of each pass and proposes rows for `TILES` in attn_kernels.py

Useful FLOPs are those of the pairs of query and key that the pattern needs: 4 D a pair forward, 10 D backward.
FlexAttention gets the same pattern twice: with the streams one after the other, as here, and interleaved into a
sequence of 2 T, as the official code of the SPS paper does. PyTorch's kernels know neither documents nor windows: they
run the plain causal pattern.
"""
import functools
import itertools
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_kernels as K
from bench import alternate, options, write_results

WIDTH, TOKENS, WINDOW = 768, 16384, 64  # heads x head size, tokens of a call
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
EVERY = 2 ** 31 - 1  # a window that limits nothing


def document_starts(B, T):
    """Documents of log-normal length, 1000 tokens on average."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(B, T, dtype=torch.int64)
    for row in starts:
        lengths = torch.exp(torch.randn(T, generator=generator) + 6.4).long() + 1
        first = lengths.cumsum(0)
        first = first[first < T]
        row[first] = first
    return starts.cummax(1).values.to(DEVICE)


def seen_keys(doc_start, windows, two_streams):
    """The keys that each query sees: {(asking stream, keys' stream): (first, last)}, tensors (B, T)."""
    t = torch.arange(doc_start.shape[1], device=DEVICE).expand_as(doc_start)
    return {(asks, keys): (torch.maximum(doc_start, t - windows[keys]), t - int(asks < keys))
            for asks, keys in itertools.product(range(1 + two_streams), repeat=2)}


def tiles_visited(seen, T, positions, keys):
    """Pairs of query and key in the tiles that the forward kernel visits, all streams that ask."""
    total, streams = 0, 2 if (1, 1) in seen else 1
    for of in range(streams):
        first = torch.stack([seen[asks, of][0] for asks in range(streams)]).amin(0)
        last = torch.stack([seen[asks, of][1] for asks in range(streams)]).amax(0)
        for a in range(0, T, positions):
            b = min(a + positions, T)
            total += (-(-(last[:, b - 1] - first[:, a] + 1) // keys)).sum().item() * keys * streams * positions
    return total


def flex_sides(qkv, doc_start, windows, interleaved):
    """Compiled FlexAttention over both streams in one sequence of 2 T, or one of T, and the pairs in its blocks."""
    B, S, T, H, D = qkv[0].shape
    order = (lambda x: x.transpose(1, 2).flatten(1, 2)) if interleaved else (lambda x: x.flatten(1, 2))
    q, k, v = (order(x.detach()).transpose(1, 2).contiguous().requires_grad_() for x in qkv)
    split = (lambda i: (i % S, i // S)) if interleaved else (lambda i: (i // T, i % T))
    window = torch.tensor(windows, device=DEVICE)

    def mask(b, h, i, j):
        (asks, t), (of, key) = split(i), split(j)
        return (key <= t - (asks < of).to(t.dtype)) & (key >= doc_start[b, t]) & (key >= t - window[of])

    blocks = create_block_mask(mask, B, None, S * T, S * T, device=DEVICE)
    call = torch.compile(flex_attention)
    visited = blocks.kv_num_blocks.sum().item()
    if blocks.full_kv_num_blocks is not None:
        visited += blocks.full_kv_num_blocks.sum().item()
    return (lambda: call(q, k, v, block_mask=blocks)), (q, k, v), visited * blocks.BLOCK_SIZE[0] * blocks.BLOCK_SIZE[1]


def measure(call, inputs):
    """Functions for `alternate`: forward alone, and forward with backward."""
    out = call()
    grad = torch.randn_like(out)
    return {'forward': call, 'both': lambda: torch.autograd.grad(call(), inputs, grad)}


def peak(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2 ** 20)


def compare(T, D, pattern, documents):
    """Rows of one pattern: ours and every other side that can run it."""
    B, H, two = max(1, TOKENS // T), WIDTH // D, pattern == 'sps'
    windows = {'causal': [EVERY, EVERY], 'window': [WINDOW, EVERY], 'sps': [EVERY, WINDOW]}[pattern]
    doc_start = document_starts(B, T) if documents else None
    starts = torch.zeros(B, T, dtype=torch.int64, device=DEVICE) if doc_start is None else doc_start
    seen = seen_keys(starts, windows, two)
    pairs = sum((last - first + 1).clamp(min=0).sum().item() for first, last in seen.values())
    qkv = [torch.randn(B, 1 + two, T, H, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    N, M, *_ = K.tiles(torch.device(DEVICE), D, torch.bfloat16, 'forward', 1 + two)
    sides = {'ours': (lambda: K._kernel_attention(*qkv, doc_start, windows, 0), qkv, tiles_visited(seen, T, N, M))}
    for interleaved in (False, True)[:1 + two]:
        sides['flex interleaved' if interleaved else 'flex'] = flex_sides(qkv, starts, windows, interleaved)
    if pattern == 'causal':  # documents or not, these run the plain causal pattern
        q, k, v = (x.detach()[:, 0].transpose(1, 2).contiguous().requires_grad_() for x in qkv)
        for name, backend in (('flash', SDPBackend.FLASH_ATTENTION), ('cudnn', SDPBackend.CUDNN_ATTENTION)):
            def fused(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            sides[f'{name}, causal'] = fused, (q, k, v), None
    rows, functions, memory = [], {}, {}
    for name, (call, inputs, _) in list(sides.items()):
        try:
            for kind, function in measure(call, inputs).items():
                memory[name, kind] = peak(function)
                functions[name, kind] = function
        except RuntimeError as error:
            print(f'{name} cannot run T = {T}, D = {D}, {pattern}: {str(error).splitlines()[0]}')
            sides.pop(name)
    seconds = alternate(functions, rounds=10, warmup=3)
    for name, (_, _, visited) in sides.items():
        forward, both = seconds[name, 'forward'], seconds[name, 'both']
        done = B * T * (T + 1) / 2 if visited is None else pairs
        rows.append({
            'pattern': pattern, 'documents': documents, 'T': T, 'D': D, 'side': name,
            'forward_ms': round(forward * 1e3, 3),
            'backward_ms': round((both - forward) * 1e3, 3), 'both_ms': round(both * 1e3, 3),
            'forward_tflops': round(4 * D * H * done / forward / 1e12, 1),
            'both_tflops': round(14 * D * H * done / both / 1e12, 1),
            'peak_mib': memory[name, 'both'],
            'pairs_visited_over_needed': None if visited is None else round(visited / pairs, 3),
            'time_over_ours': round(both / seconds['ours', 'both'], 3)})
    return rows


def decoding():
    """A step of 16 rows over 4096 keys, as CUDA graphs: the pair of SPS over the single position of Standard."""
    B, H, D, S, R = 16, 12, 64, 4096, 80
    functions = {}
    for name, streams in (('standard', 1), ('sps', 2)):
        ring = R if streams == 2 else 0
        q, k, v = torch.randn(3, B, streams, 1, H, D, device=DEVICE, dtype=torch.bfloat16)
        cache = torch.randn(2, B, H, ring + S + 1, D, device=DEVICE, dtype=torch.bfloat16)
        rope = K.rope_table(torch.arange(S + 1, device=DEVICE), D, 10000.0)
        positions = torch.full((B, 1), S - 1, device=DEVICE)
        slots = torch.stack([ring + positions, ring - 1 - positions % max(ring, 1)], 1)[:, :streams].contiguous()
        ring_positions = None
        if ring:
            ring_positions = torch.arange(S - 2, S - 3 - R, -1, device=DEVICE).expand(B, R + 1).contiguous()
        step = functools.partial(
            K.decode_attention, q, k, v, *cache, rope, positions, slots, None, [None, 64],
            ring_positions=ring_positions, queries='both' if ring else 'input', reads='both' if ring else 'memory')
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):  # as the layers of a model
                step()
        functions[name] = graph.replay
    seconds = alternate(functions, rounds=20, warmup=3)
    return [{'pattern': 'decoding', 'T': S, 'D': D, 'batch': B,
             'sps_over_standard': round(seconds['sps'] / seconds['standard'], 3)}]


def tune():
    """Times candidates of each pass on documents, one stream and two; prints the rows for `TILES`."""
    arch = 'sm_{}{}'.format(*torch.cuda.get_device_capability())
    candidates = list(itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))
    for largest in (64, 96, 128):
        row, D = {}, {64: 64, 96: 88, 128: 128}[largest]
        best = K.TILES['sm_90', largest, 16]
        K.TILES['sm_90', largest, 16] = dict(best)
        doc_start = document_starts(4, 4096)
        calls = []
        for streams, windows in ((1, [EVERY, EVERY]), (2, [EVERY, WINDOW])):
            shape = 4, streams, 4096, 12, D
            qkv = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            calls.append((functools.partial(K._kernel_attention, *qkv, doc_start, windows, 0), qkv))
        for kind in ('forward', 'query_gradient', 'key_gradient'):
            times = {}
            for candidate in candidates:
                K.TILES['sm_90', largest, 16] = best | {kind: candidate}
                try:
                    functions = [measure(call, qkv)['forward' if kind == 'forward' else 'both'] for call, qkv in calls]
                    times[candidate] = sum(alternate(dict(enumerate(functions)), rounds=5, warmup=2).values())
                except Exception as error:  # a tile that this GPU cannot hold
                    print(f'{kind} {candidate}: {type(error).__name__}')
            row[kind] = min(times, key=times.get)
            print(f'{kind} {row[kind]}: {times[row[kind]] * 1e3:.3f} ms, '
                  f'so far {best[kind]}: {times.get(best[kind], float("nan")) * 1e3:.3f} ms', flush=True)
            best = best | {kind: row[kind]}
        print(f'    ({arch!r}, {largest}, 16): {row},')


def figures():
    yield from decoding()
    for D, T in itertools.product((64, 128), LENGTHS):
        for pattern, documents in itertools.product(('causal', 'window', 'sps'), (False, True)):
            # T = 4096 for every pattern; elsewhere what the length changes
            if T == 4096 or (pattern != 'window' and D == 64):
                yield from compare(T, D, pattern, documents)
                torch.compiler.reset()


def main(argv=None):
    given = options(argv, '--tune')
    if not torch.cuda.is_available():
        sys.exit('bench.attention: PyTorch sees no GPU here; bench.attention_cpu measures the forms for a CPU')
    if '--tune' in given:
        return tune()
    write_results('attention', figures(), markdown=True)


if __name__ == '__main__':
    main()
