"""The main loops of the attention kernels in machine code, beside those of others: `python -m bench.compiled --beside`.

Ours, PyTorch's FlexAttention (its templates, rendered from the installed PyTorch as `torch.compile` would for causal
attention, with its tiles for an H100) and flash attention as Triton's tutorial teaches it (`tutorial_...` below), all
compiled for sm_90 by the same compiler. Counted is the innermost loop over full tiles, which is where the time goes.
Writes bench/results/sass_sm90.csv and .md.

Compiling is not running: an instruction costs at least one issue slot, and what waits for what is not in the counts.
"""
import csv
import datetime
import importlib.util
import math
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jinja2
import torch
import triton
import triton.language as tl
from torch._inductor.kernel import flex
from triton import jit
from triton.language import constexpr

from bench import RESULTS, compiled, markdown_table, show

TEMPLATES = Path(flex.__file__).parent / 'templates'
T, B, H = 4096, 2, 8  # of the launches that are compiled
FP32 = {'FADD', 'FMUL', 'FFMA', 'FMNMX', 'FSETP', 'FSEL'}
PASSES = {'forward': 'forward', 'query_gradient': 'dq', 'key_gradient': 'dk, dv'}
PRODUCTS = {'forward': 2, 'dq': 3, 'dk, dv': 4}  # matrix products of a pair of tiles


# ---- what a loop takes ----

def counts(loop, warps):
    """Of a loop's instructions: how many of each kind a warp executes, and the cycles that all warps of a block take.

    An SM issues an instruction to each of its four quarters in a cycle, has 16 MUFU lanes, 2048 multiply-adds of bf16
    and 128 bytes of shared memory.
    """
    found = dict.fromkeys(('instructions', 'HGMMA', 'MUFU', 'FP32', 'convert', 'shared', 'global', 'local', 'uniform'),
                          0)
    tensor_cycles = shared_bytes = 0
    for line in loop:
        never, name, rest = re.match(r'(@!PT +)?(?:@!?U?P\d +)?([A-Z0-9]+)(.*)', line).groups()
        found['instructions'] += 1
        if name == 'HGMMA':
            n = int(re.match(r'\.64x(\d+)x16', rest)[1])
            tensor_cycles += n / 2  # 64 n 16 multiply-adds, of which an SM does 2048 in a cycle
            from_registers = re.match(r'\S+ R\d+, R\d+, gdesc', rest)
            shared_bytes += 2 * 16 * (n + (0 if from_registers else 64)) / 4  # a warp's share of the group's
        width = 16 if '.128' in rest or name in ('LDSM', 'STSM') else 8 if '.64' in rest.split(' ')[0] else 4
        group = ('HGMMA' if name == 'HGMMA' else 'MUFU' if name == 'MUFU' else 'FP32' if name in FP32 else
                 'convert' if name == 'F2FP' else 'local' if name in ('LDL', 'STL') else
                 'shared' if name in ('LDS', 'STS', 'LDSM', 'STSM') and not never else
                 'global' if name in ('LDG', 'STG', 'LDGSTS', 'RED', 'UTMALDG') else
                 'uniform' if name.startswith('U') else None)
        if group:
            found[group] += 1
        if group == 'shared' or name == 'LDGSTS':
            shared_bytes += 32 * width
    schedulers = warps / 4  # warps of a block on each of the four
    cycles = {'tensor': tensor_cycles * schedulers, 'MUFU': 8 * found['MUFU'] * schedulers,
              'issue': found['instructions'] * schedulers, 'shared': shared_bytes * warps / 128}
    return found, cycles


def occupancy(registers, shared, warps):
    """Blocks that an SM of an H100 holds: 64K registers in units of 256 a warp, 228 KiB of shared memory, 64 warps."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, 228 * 1024 // (shared + 1024), 64 // warps)


def rows_of(built, whose, tiles, D, warps, stages):
    """A row for each part of a kernel, {part (of PRODUCTS): (queries, keys) of its tile}, in the order of its loops.

    Each part has a loop over masked tiles and one over full tiles, which is the shorter one. 'useful': the share of the
    time that the products would take if the resource that binds were all that takes time.
    """
    found, rows = compiled.resources(built), []
    found = {name: found[name] for name in ('registers', 'stack', 'shared')}
    loops = [loop for loop in compiled.innermost_loops(compiled.disassembled(built)) if 'HGMMA' in ' '.join(loop)]
    for i, (part, (queries, keys)) in enumerate(tiles.items()):
        of_part = loops[i * len(loops) // len(tiles):(i + 1) * len(loops) // len(tiles)]
        seen, cycles = counts(min(of_part, key=len), warps)
        binds, pairs = max(cycles, key=cycles.get), queries * keys
        rows.append({'pass': part, 'head': D, 'whose': whose, 'tile': f'{queries} x {keys}', 'warps': warps,
                     'stages': stages, **found, 'blocks': occupancy(found['registers'], found['shared'], warps),
                     **{f'n {name}': n for name, n in seen.items()},
                     'a pair': round(seen['instructions'] * warps * 32 / pairs, 2),
                     **{f'cycles {name}': round(n) for name, n in cycles.items()}, 'binds': binds,
                     'useful': round(pairs * PRODUCTS[part] * D / 2048 / cycles[binds], 2)})
    return rows


# ---- ours ----

def our_rows(D, pattern):
    """Of a pattern of `compiled.PATTERNS` with documents, with the tiles of `attn_kernels.TILES`."""
    rows = []

    def measure(built):
        kind = built.metadata.name.strip('_').removesuffix('_kernel')
        queries, keys, warps, stages = compiled.K.tiles(torch.device('meta'), D, torch.bfloat16, kind)
        rows.extend(rows_of(built, f'ours, {pattern}', {PASSES[kind]: (queries, keys)}, D, warps, stages))
        return {}
    compiled.build((pattern, True, D, torch.bfloat16), measure)
    return rows


# ---- FlexAttention, as PyTorch has it ----

FLEX_FORWARD = 'Q K V LSE MAX KV_NUM_BLKS KV_IDX FULL_KV_NUM_BLKS FULL_KV_IDX'.split()
FLEX_BACKWARD = ('Q K V LSE DELTA DO DQ DV KV_NUM_BLKS KV_IDX Q_NUM_BLKS Q_IDX FULL_KV_NUM_BLKS FULL_KV_IDX '
                 'FULL_Q_NUM_BLKS FULL_Q_IDX').split()
MODIFICATIONS = {'post_mod_scores': '{score}', 'grad_scores': '{grad_score_mod}', 'mask_mod_output': '{n} <= {m}'}


def flex_kernel(folder, files, names, options, D):
    """A FlexAttention kernel for causal attention, from PyTorch's templates, and its arguments on the meta device."""
    def tensor(name):
        if 'NUM_BLKS' in name or 'IDX' in name:
            return torch.empty((1, 1, T // 128, T // 128)[:4 if 'IDX' in name else 3], dtype=torch.int32, device='meta')
        small = name in ('LSE', 'MAX', 'DELTA')
        shape, dtype = ((B, H, T), torch.float32) if small else ((B, H, T, D), torch.bfloat16)
        return torch.empty(shape, dtype=dtype, device='meta')

    tensors = {name: tensor(name) for name in [*names, 'OUT']}
    options = {'PRESCALE_QK': False, 'ROWS_GUARANTEED_SAFE': False, 'BLOCKS_ARE_CONTIGUOUS': False, 'WRITE_DQ': True,
               'OUTPUT_LOGSUMEXP': True, 'OUTPUT_MAX': False, 'IS_DIVISIBLE': True, 'SAFE_HEAD_DIM': True,
               'HAS_FULL_BLOCKS': True, 'USE_TMA': False, 'SM_SCALE': D ** -0.5, 'GQA_SHARED_HEADS': 1,
               'QK_HEAD_DIM': D, 'QK_HEAD_DIM_ROUNDED': D, 'V_HEAD_DIM': D, 'V_HEAD_DIM_ROUNDED': D,
               'SPARSE_Q_BLOCK_SIZE': 128, 'SPARSE_KV_BLOCK_SIZE': 128, 'FLOAT32_PRECISION': "'ieee'",
               'INDEX_DTYPE': 'tl.int32', **options}
    arguments = ', '.join(f'arg_{name}' for name in tensors)
    defines = '\n'.join(f'{name}: tl.constexpr = {value}' for name, value in options.items())

    def def_kernel(*names):
        body = '\n'.join([defines, *(f'{name} = arg_{name}' for name in names)]).replace('\n', '\n    ')
        return f'import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel({arguments}):\n    {body}'

    def stride(name, axis=None):
        strides = tensors[name].stride()
        return ', '.join(map(str, strides)) if axis is None else str(strides[axis])

    def modification(output_name, **given):
        return f'{output_name} = {MODIFICATIONS[output_name].format(**given)}' if output_name else 'pass'

    def store_output(index, value, mask, indent_width=4, **_):
        strides = tensors['OUT'].stride()
        offset = ' + '.join(f'{i} * {n}' for i, n in zip(index, strides))
        return f'tl.store(arg_OUT + {offset}, {value}, {mask})'

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters['indent_except_first'] = lambda text, levels: text.replace('\n', '\n' + '    ' * levels)
    text = '\n'.join((TEMPLATES / f'{name}.py.jinja').read_text() for name in files)
    text = environment.from_string(text).render(
        **options, def_kernel=def_kernel, gen_argdefs=lambda: arguments, gen_defines=lambda: defines,
        stride=stride, size=lambda name, axis: str(tensors[name].shape[axis]), modification=modification,
        store_output=store_output)
    path = Path(folder) / f'{files[0]}.py'
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(files[0], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel, list(tensors.values())


def flex_rows(D):
    """With the tiles that PyTorch takes on an H100 in bf16, of `CUDAConfigHeuristic`."""
    keys, warps = {64: (128, 4), 128: (64, 8)}[D]
    with tempfile.TemporaryDirectory() as folder:
        kernel, args = flex_kernel(folder, ['flex_attention', 'utilities', 'common'], FLEX_FORWARD,
                                   {'BLOCK_M': 128, 'BLOCK_N': keys}, D)
        rows = rows_of(compiled.compile_launch(kernel, args, warps, 3), 'FlexAttention', {'forward': (128, keys)}, D,
                       warps, 3)
        blocks = {'BLOCK_M1': 64, 'BLOCK_N1': 128, 'BLOCK_M2': 128, 'BLOCK_N2': 64}
        kernel, args = flex_kernel(folder, ['flex_backwards', 'utilities'], FLEX_BACKWARD, blocks, D)
        return rows + rows_of(compiled.compile_launch(kernel, args, 8, 3), 'FlexAttention',
                              {'dq': (128, 64), 'dk, dv': (64, 128)}, D, 8, 3)


# ---- flash attention as in Triton's tutorial on fused attention: causal, contiguous (B, H, T, D) ----

@jit
def _tile(x, base, first, N: constexpr, D: constexpr):
    return tl.load(x + base + (first + tl.arange(0, N))[:, None] * D + tl.arange(0, D)[None, :])


@jit
def _put(x, base, first, y, N: constexpr, D: constexpr):
    at = x + base + (first + tl.arange(0, N))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, y.to(x.dtype.element_ty))


@jit
def tutorial_keys(acc, l, m, q_tile, k, v, base, scale, first, lo, hi, T, D: constexpr, N: constexpr, M: constexpr,
                  MASKED: constexpr, TMA: constexpr):
    if TMA:
        k_rows = tl.make_tensor_descriptor(k + base, shape=[T, D], strides=[D, 1], block_shape=[M, D])
        v_rows = tl.make_tensor_descriptor(v + base, shape=[T, D], strides=[D, 1], block_shape=[M, D])
    for n in range(lo, hi, M):
        n = tl.multiple_of(n, M)
        s = tl.dot(q_tile, tl.trans(k_rows.load([n, 0]) if TMA else _tile(k, base, n, M, D)))
        if MASKED:
            seen = (first + tl.arange(0, N))[:, None] >= (n + tl.arange(0, M))[None, :]
            s = tl.where(seen, s, -1e6)
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(tl.bfloat16), v_rows.load([n, 0]) if TMA else _tile(v, base, n, M, D), acc)
        m = m_new
    return acc, l, m


@jit
def tutorial_forward(q, k, v, out, lse, scale, T, D: constexpr, N: constexpr, M: constexpr, TMA: constexpr):
    first, base = tl.program_id(0) * N, tl.program_id(1).to(tl.int64) * T * D
    q_tile = _tile(q, base, first, N, D)
    m = tl.full((N,), float('-inf'), tl.float32)
    l = tl.zeros((N,), tl.float32) + 1.0
    acc = tl.zeros((N, D), tl.float32)
    acc, l, m = tutorial_keys(acc, l, m, q_tile, k, v, base, scale, first, 0, first, T, D, N, M, False, TMA)
    acc, l, m = tutorial_keys(acc, l, m, q_tile, k, v, base, scale, first, first, first + N, T, D, N, M, True, TMA)
    tl.store(lse + tl.program_id(1) * T + first + tl.arange(0, N), m + tl.log2(l))
    _put(out, base, first, acc / l[:, None], N, D)


@jit
def tutorial_dkdv(dk, dv, k_tile, v_tile, q, grad, lse, delta, base, rows, first, lo, hi, D: constexpr, N: constexpr,
                  M: constexpr, MASKED: constexpr):
    for n in range(lo, hi, N):
        q_tile = _tile(q, base, n, N, D)
        row = n + tl.arange(0, N)
        p = tl.exp2(tl.dot(k_tile, tl.trans(q_tile)) - tl.load(lse + rows + row)[None, :])
        if MASKED:
            p = tl.where(row[None, :] >= (first + tl.arange(0, M))[:, None], p, 0.0)
        grad_tile = _tile(grad, base, n, N, D)
        dv += tl.dot(p.to(tl.bfloat16), grad_tile)
        ds = p * (tl.dot(v_tile, tl.trans(grad_tile)) - tl.load(delta + rows + row)[None, :])
        dk += tl.dot(ds.to(tl.bfloat16), q_tile)
    return dk, dv


@jit
def tutorial_dq(dq, q_tile, grad_tile, row_lse, row_delta, k, v, base, first, lo, hi, D: constexpr, N: constexpr,
                M: constexpr, MASKED: constexpr):
    for n in range(lo, hi, M):
        k_tile, v_tile = _tile(k, base, n, M, D), _tile(v, base, n, M, D)
        p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile)) - row_lse[:, None])
        if MASKED:
            p = tl.where((first + tl.arange(0, N))[:, None] >= (n + tl.arange(0, M))[None, :], p, 0.0)
        ds = p * (tl.dot(grad_tile, tl.trans(v_tile)) - row_delta[:, None])
        dq += tl.dot(ds.to(tl.bfloat16), k_tile)
    return dq


@jit
def tutorial_backward(q, k, v, grad, lse, delta, dq, dk, dv, scale, T, D: constexpr, N1: constexpr, M1: constexpr,
                      N2: constexpr, M2: constexpr):
    """dk and dv of M1 keys by tiles of N1 queries, then dq of N2 queries by tiles of M2 keys; k is scaled already."""
    first, base, rows = tl.program_id(0) * M1, tl.program_id(1).to(tl.int64) * T * D, tl.program_id(1) * T
    dk_tile, dv_tile = tl.zeros((M1, D), tl.float32), tl.zeros((M1, D), tl.float32)
    k_tile, v_tile = _tile(k, base, first, M1, D), _tile(v, base, first, M1, D)
    dk_tile, dv_tile = tutorial_dkdv(dk_tile, dv_tile, k_tile, v_tile, q, grad, lse, delta, base, rows, first, first,
                                     first + M1, D, N1, M1, True)
    dk_tile, dv_tile = tutorial_dkdv(dk_tile, dv_tile, k_tile, v_tile, q, grad, lse, delta, base, rows, first,
                                     first + M1, T, D, N1, M1, False)
    _put(dv, base, first, dv_tile, M1, D)
    _put(dk, base, first, dk_tile * scale, M1, D)
    first = tl.program_id(0) * N2
    q_tile, grad_tile = _tile(q, base, first, N2, D), _tile(grad, base, first, N2, D)
    row = rows + first + tl.arange(0, N2)
    row_lse, row_delta = tl.load(lse + row), tl.load(delta + row)
    dq_tile = tl.zeros((N2, D), tl.float32)
    dq_tile = tutorial_dq(dq_tile, q_tile, grad_tile, row_lse, row_delta, k, v, base, first, first, first + N2, D, N2,
                          M2, True)
    dq_tile = tutorial_dq(dq_tile, q_tile, grad_tile, row_lse, row_delta, k, v, base, first, 0, first, D, N2, M2, False)
    _put(dq, base, first, dq_tile * 0.6931471824645996, N2, D)


def tutorial_rows(D):
    """With the tutorial's tiles; forward with pointers and with tensor descriptors (TMA)."""
    x, statistic = (torch.empty(shape, dtype=dtype, device='meta') for shape, dtype in (
        ((B, H, T, D), torch.bfloat16), ((B, H, T), torch.float32)))
    scale, rows = D ** -0.5 * math.log2(math.e), []
    for tma in (False, True):
        built = compiled.compile_launch(tutorial_forward, [x, x, x, x, statistic, scale, T, D, 128, 64, tma], 8, 3)
        rows += rows_of(built, f'tutorial{", TMA" * tma}', {'forward': (128, 64)}, D, 8, 3)
    args = [x, x, x, x, statistic, statistic, x, x, x, scale, T, D, 32, 128, 128, 32]
    return rows + rows_of(compiled.compile_launch(tutorial_backward, args, 4, 5), 'tutorial',
                          {'dk, dv': (32, 128), 'dq': (128, 32)}, D, 4, 5)


# ---- the table ----

def with_ratios(rows):
    """The rows by pass and head size, with the instructions a pair of our one stream over each one's."""
    ours = {(row['pass'], row['head']): row['a pair'] for row in rows if row['whose'] == 'ours, one stream'}
    rows = [row | {'ours over it': round(ours[row['pass'], row['head']] / row['a pair'], 2)} for row in rows]
    return sorted(rows, key=lambda row: (list(PRODUCTS).index(row['pass']), row['head'], row['whose']))


def main():
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(function, D, *args) for D in (64, 128) for function, *args in (
            (our_rows, 'one stream'), (our_rows, 'two streams'), (flex_rows,), (tutorial_rows,))]
        rows = with_ratios([show(row) for job in jobs for row in job.result()])
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/ptxas'
    ptxas = re.search(r'V[\d.]+', subprocess.run([tool, '--version'], capture_output=True, text=True).stdout)[0]
    where = (f'{datetime.date.today()}, compiled for sm_90 with PyTorch {torch.__version__}, Triton '
             f'{triton.__version__}, ptxas {ptxas}; bf16, T {T}, causal; ours with documents')
    with open(RESULTS / 'sass_sm90.csv', 'w', newline='') as file:
        file.write(f'# {where}\n')
        writer = csv.DictWriter(file, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    names = ('pass', 'head', 'whose', 'tile', 'warps', 'stages')
    code = ('registers', 'stack', 'shared', 'blocks', *(name for name in rows[0] if name.startswith('n ')), 'a pair',
            'ours over it')
    cycles = (*(name for name in rows[0] if name.startswith('cycles ')), 'binds', 'useful')
    tables = [markdown_table([{name: row[name] for name in (*names, *columns)} for row in rows])
              for columns in (code, cycles)]
    text = (f'{where}. Made by `python -m bench.compiled --beside`; docs/gpu.md says how to read it.\n\n'
            f'Instructions of the main loop over full tiles, of one warp:\n\n{tables[0]}\n\n'
            f'Cycles of an SM that a tile takes of each resource, for all warps of a block:\n\n{tables[1]}\n')
    (RESULTS / 'sass_sm90.md').write_text(text)
    print(f'written to {RESULTS / "sass_sm90.md"}')
