"""Compiles every Triton kernel for an H100 (sm_90), GPU or not: what each takes of registers, stack, shared memory.

    python -m bench.compiled            fails if a kernel spills registers, asks for more shared memory than there is,
                                        or is attention in 16 bits without HGMMA
    python -m bench.compiled --short    each kernel once at each head size
    python -m bench.compiled --beside   the main loops beside those of FlexAttention and of Triton's tutorial

Compiling is not running: it proves that a variant builds and fits, not that it is right or fast.
"""
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import attn_kernels as K
from bench import markdown_table, options, show
from common import int8

# None where the folder scans/ has been removed
delta_rule, scan, gdn = (K.import_scan(name) for name in ('delta_rule', 'gpn', 'gdn'))
SHARED_LIMIT = 232448  # bytes a block may use on an H100
TYPES = {torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.float32: 'fp32', torch.int64: 'i64', torch.int32: 'i32',
         torch.int8: 'i8', torch.bool: 'i1'}
KERNELS = {(module, name): getattr(module, name) for module, names in (
    (K, ('_forward_kernel', '_query_gradient_kernel', '_key_gradient_kernel', '_decode_kernel', '_combine_kernel')),
    (int8, ('_int8_product_kernel',)), (delta_rule, ('_delta_steps_kernel', '_delta_backward_kernel')),
    (gdn, ('_walk_kernel',)),
    (scan, ('_gated_add_norm_kernel', '_gated_add_norm_backward_kernel', '_glu_kernel', '_glu_backward_kernel',
            '_memory_inputs_kernel', '_memory_inputs_backward_kernel')))
    for name in names if module}
PATTERNS = {  # (streams of queries, streams of keys, first stream of queries, query heads for each key head)
    'one stream': (1, 1, 0, 1), 'two streams': (2, 2, 0, 1), 'two streams, x asks': (1, 2, 0, 1),
    'two streams, rho asks': (1, 2, 1, 1), 'one stream, groups of 4': (1, 1, 0, 4),
    'two streams, groups of 4': (2, 2, 0, 4)}


def compile_launch(kernel, args, num_warps, num_stages):
    """What Triton would build for a launch with these: tensors (of any device), numbers, None, tuples of numbers."""
    signature, constants, attributes = {}, {}, {}

    def describe(path, value, always):
        if isinstance(value, tuple):
            return tuple(describe(path + (i,), x, always) for i, x in enumerate(value))
        if isinstance(value, torch.Tensor):
            if value.storage_offset() * value.itemsize % 16 == 0:
                attributes[path] = [['tt.divisibility', 16]]
            return '*' + TYPES[value.dtype]
        if always or value is None or value == 1 and isinstance(value, int):
            constants[path] = value
            return 'constexpr'
        if isinstance(value, float):
            return 'fp32'
        if value % 16 == 0:
            attributes[path] = [['tt.divisibility', 16]]
        return 'i32' if abs(value) < 2 ** 31 else 'i64'

    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        signature[parameter.name] = describe((i,), value, parameter.is_constexpr)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget('cuda', 90, 32),
                          options=dict(num_warps=num_warps, num_stages=num_stages))


def run_tool(name, *options, built):
    """What a tool of Triton's, cuobjdump or nvdisasm, prints of a kernel."""
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin' / name
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(built.asm['cubin'])
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def disassembled(built):
    """A kernel's machine code (SASS): a list of labels and instructions."""
    text = run_tool('nvdisasm', '-c', built=built)
    lines = (re.match(r'(\.L_x_\d+):|\s+/\*[0-9a-f]+\*/\s+(.+?) *;', line) for line in text.splitlines())
    return [line[1] or line[2] for line in lines if line]


def innermost_loops(lines):
    """The instructions of each loop that has no other within: from a label to the branch back to it."""
    place = {line: i for i, line in enumerate(lines) if line.startswith('.L_x_')}
    loops = []
    for i, line in enumerate(lines):
        back = re.search(r'BRA.* `\((\.L_x_\d+)\)', line)
        if back and place.get(back[1], i) < i:
            loops.append((place[back[1]], i))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[line for line in lines[a:b + 1] if not line.startswith('.L_x_')] for a, b in inner]


def resources(built):
    """Registers of a thread, bytes of stack, bytes of shared memory; spilled registers live on the stack.

    How many products of a warp group (wgmma, HGMMA in machine code) the source for the assembler has, and of one warp
    (mma, slower on an H100).
    """
    usage, source = run_tool('cuobjdump', '-res-usage', built=built), built.asm['ptx']
    return {'registers': int(re.search(r'REG:(\d+)', usage)[1]), 'stack': int(re.search(r'STACK:(\d+)', usage)[1]),
            'shared': built.metadata.shared, 'wgmma': source.count('wgmma.mma_async'), 'mma': source.count('mma.sync')}


class Recorder:
    """Stands in for a kernel: a launch compiles it instead, and notes what `measure` finds."""

    def __init__(self, kernel, rows, variant, measure=resources):
        self.kernel, self.rows, self.variant, self.measure = kernel, rows, variant, measure

    def __getitem__(self, grid):
        def launch(*args, num_warps, num_stages):
            built = compile_launch(self.kernel, args, num_warps, num_stages)
            self.rows.append(self.variant | {'kernel': self.kernel.__name__.strip('_'), 'warps': num_warps,
                                             'stages': num_stages, **self.measure(built)})
        return launch


GPN_SIZES = (2496, 6656, 15, 128, 256), (1920, 5120, 11, 128, 256), (256, 683, 4, 32, 64), (100, 300, 2, 70, 48)
INT8_SIZES = (1, 768, 50304), (16, 768, 2304), (64, 1280, 2560), (5, 100, 70)  # rows of x, K, N
GDN_SIZES = (64, 128, 256), (64, 64, 64), (64, 32, 64), (20, 70, 48)  # chunk_len, d_k, d_v


def short_variants():
    """Each kernel once at each head size."""
    for D in (16, 48, 64, 68, 70, 88, 128):
        yield 'two streams', True, D, torch.bfloat16
    for D in (64, 70, 128):
        yield 'two streams', True, D, torch.bfloat16, 1
    for D in (64, 70, 128):
        yield 'one stream, groups of 4', True, D, torch.bfloat16
    for D in (64, 128):
        yield 'one stream, groups of 4', True, D, torch.bfloat16, 1
    yield 'two streams', True, 128, torch.bfloat16, 1, torch.float32
    for sizes in GPN_SIZES if scan else ():
        yield 'gpn', True, sizes, torch.bfloat16
    for sizes in GDN_SIZES if gdn else ():
        yield 'gdn', True, sizes, torch.float32
    yield 'int8', False, INT8_SIZES[0], torch.bfloat16


def variants():
    """The patterns at the head sizes and dtypes that configs use, then each remaining head size and dtype once."""
    for D in (64, 128):
        for pattern in PATTERNS:
            for documents in (False, True):
                yield pattern, documents, D, torch.bfloat16
    for D in (16, 48, 68, 70, 88):
        yield 'two streams', True, D, torch.bfloat16
    for D in (64, 128):
        yield 'two streams', True, D, torch.float16
        yield 'two streams', True, D, torch.float32
    yield 'one stream', True, 48, torch.float32

    for pattern, runs in (('one stream', (1, 16)), ('two streams', (1, 8)), ('two streams, rho asks', (1,)),
                          ('one stream, groups of 4', (1, 16)), ('two streams, groups of 4', (1,))):
        for run in runs:
            for D, dtype in ((64, torch.bfloat16), (70, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)):
                yield pattern, True, D, dtype, run
    yield 'two streams', True, 128, torch.bfloat16, 1, torch.float32  # over a cache in fp32, as under autocast
    for sizes in GPN_SIZES if scan else ():
        for documents in (False, True):
            yield 'gpn', documents, sizes, torch.bfloat16
    for sizes in GDN_SIZES if gdn else ():
        yield 'gdn', True, sizes, torch.float32
    for sizes in INT8_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            yield 'int8', False, sizes, dtype


def build(variant, measure=resources):
    """A row for each kernel launched: by one attention, forward and backward; by one over a cache; or by a step of GPN,
    its gradient and a replay of the memory; by Gated DeltaNet's walk over chunks and its walk back; by a product with
    8-bit weights. measure(built kernel) -> dict."""
    pattern, documents, D, dtype, *run = variant
    if pattern == 'gpn':
        return build_gpn(documents, *D, dtype)
    if pattern == 'gdn':
        return build_gdn(*D, dtype)
    if pattern == 'int8':
        return build_int8(*D, dtype)
    NQ, NK, first, group = PATTERNS[pattern]
    B, T, H, rows = 2, run[0] if run else 4096, 8, []
    described = {'pattern': pattern, 'documents': documents, 'run': T, 'head': D, 'dtype': TYPES[dtype]}
    for (module, name), kernel in KERNELS.items():
        setattr(module, name, Recorder(kernel, rows, described, measure))
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device='meta')
    q, k = empty(B, NQ, T, H, D), empty(B, NK, T, H // group, D)
    doc_start = empty(B, T, dtype=torch.int64) if documents else None
    if run:
        cache = empty(B, H // group, 4096, D, dtype=(run[1:] or [dtype])[0])
        table = empty(4096, 1, D // 2, dtype=torch.float32)
        positions = empty(B, T, dtype=torch.int64)
        slots, ring_positions = empty(B, NK, T, dtype=torch.int64), None if NK == 1 else empty(B, 81, dtype=torch.int64)
        K.decode_forward(q, k, k, cache, cache, table, table, positions, slots, doc_start, ring_positions,
                         [2 ** 31 - 1, 64], first, 1,
                         'memory' if NK == 1 else 'both')
    else:
        out, lse = K.attention_forward(q, k, k, doc_start, [T, 64], first)
        K.attention_backward(out, q, k, k, out, lse, doc_start, [T, 64], first)
    return rows


def build_gpn(documents, C, n_ffn, H, d_k, d_v, dtype):
    """Rows of the kernels of GPN's step, forward and backward, at these sizes."""
    B, S, rows = 2, 32, []
    described = {'pattern': 'gpn', 'documents': documents, 'run': S, 'head': f'{d_k} x {d_v}', 'dtype': TYPES[dtype]}
    for (module, name), kernel in KERNELS.items():
        setattr(module, name, Recorder(kernel, rows, described))
    K.KERNELS_ON_CPU = True  # and on the tensors here, which are nowhere

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device='meta')

    widths = [C, H * (2 * d_k + d_v + 2), 2 * n_ffn + H * d_v]
    x = empty(B, C)
    gate_in, memory_in, glu_in = empty(B, sum(widths), dtype=dtype).split(widths, -1)
    for add in (x, x.to(dtype)):
        scan.gated_add_norm(gate_in, x, add, 1e-3, dtype)
    scan.gated_add_norm_backward(x.to(dtype), x, x[:, :1], x, x)
    for memory_read in (empty(B, H * d_v), None):
        part = glu_in if memory_read is not None else glu_in[:, :2 * n_ffn]
        y = scan.glu(part, memory_read, 1e-3, dtype)
        scan.glu_backward(y, part, memory_read, 1e-3, part, y)
    memory, k, v, scalars = empty(B, H, d_k, d_v), empty(S, B, H, d_k), empty(S, B, H, d_v), empty(S, B, H)
    carry_mask = empty(S, B, 1) if documents else None
    first = carry_mask if carry_mask is None else carry_mask[0]
    for rate in (empty(H), None):
        scan.memory_inputs(memory_in if rate is not None else memory_in[:, :H * d_k], rate, H, d_k, 1e-6)
        scan.memory_inputs_backward(memory_in, rate, 1e-6, memory_in, k[0], k[0], v[0], scalars[0], scalars[0])
    delta_rule.delta_step(memory, k[0], v[0], scalars[0], scalars[0], k[0], first)
    delta_rule.delta_replay(memory, k, v, scalars, scalars, carry_mask)
    delta_rule.delta_step_backward(memory, memory, k[0], v[0], scalars[0], scalars[0], k[0], v[0], first)
    return rows


def build_gdn(C, d_k, d_v, dtype):
    """Rows of the kernel of Gated DeltaNet's walk over chunks of C tokens, on and back."""
    B, H, n_chunks, rows = 2, 6, 32, []
    described = {'pattern': 'gdn', 'documents': True, 'run': C, 'head': f'{d_k} x {d_v}', 'dtype': TYPES[dtype]}

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device='meta')
    memory, before, keys = empty(B, H, d_k, d_v), empty(n_chunks, B, H, d_k, d_v), empty(n_chunks, B, H, C, d_k)
    values, carried = empty(n_chunks, B, H, C, d_v), empty(n_chunks, B, H)
    for direction, is_back in (('on', False), ('back', True)):
        gdn._walk_kernel = Recorder(KERNELS[gdn, '_walk_kernel'], rows, described | {'pattern': f'gdn, {direction}'})
        gdn._walk_in_triton(memory, keys, keys, values, carried, before if is_back else None, before, values,
                            memory, is_back)
    return rows


def build_int8(M, K, N, dtype):
    """The row of the product of M vectors of K and an 8-bit matrix (N, K)."""
    rows = []
    described = {'pattern': 'int8', 'documents': False, 'run': M, 'head': f'{K} x {N}', 'dtype': TYPES[dtype]}
    int8._int8_product_kernel = Recorder(KERNELS[int8, '_int8_product_kernel'], rows, described)
    weight = torch.empty(N, K, dtype=torch.int8, device='meta')
    int8._gpu_product(torch.empty(M, K, dtype=dtype, device='meta'), weight,
                      torch.empty(N, dtype=torch.float32, device='meta'), torch.empty(N, dtype=dtype, device='meta'))
    return rows


def main(argv=None):
    given = options(argv, '--short', '--beside')
    if os.environ.get('TRITON_INTERPRET') == '1':
        sys.exit('bench.compiled: TRITON_INTERPRET=1 is set, and an interpreted kernel cannot be compiled: unset it')
    if '--beside' in given:
        from bench import beside  # which imports this module
        return beside.main()
    with ProcessPoolExecutor() as pool:
        built = pool.map(build, short_variants() if '--short' in given else variants())
        rows = [show(row) for rows in built for row in rows]
    trained = 'forward_kernel', 'query_gradient_kernel', 'key_gradient_kernel'
    bad = [row for row in rows if row['stack'] > 0 or row['shared'] > SHARED_LIMIT
           or row['kernel'] in trained and row['dtype'] != 'fp32' and (row['wgmma'] == 0 or row['mma'] > 0)]
    if bad:
        sys.exit(f'\nbench.compiled: these spill registers, ask for more than {SHARED_LIMIT} bytes of shared memory or '
                 f'do not use HGMMA: choose other tiles\n\n{markdown_table(bad)}')


if __name__ == '__main__':
    main()
