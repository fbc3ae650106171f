"""scans/gpn.py: steps in C and in Triton's kernels beside the equations, in float64 where nothing else is said."""
import platform
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_attn_kernels import assert_close
from test_gpn import (
    SMALL,
    decoding_is_the_step_repeated,
    loss_and_gradients,
    make,
    needs_triton,
    plain_states,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attn_kernels
import model_gpn as G
from bench.gpn import bounds
from scans import gpn as scan

CPU = torch.device('cpu')
needs_c = pytest.mark.skipif(not scan.runs_on(CPU), reason='no C compiler here')
needs_bf16_units = pytest.mark.skipif(scan.c_dtype(torch.bfloat16) != torch.bfloat16,
                                      reason='no C compiler or no bf16 units here')


# ---- building gpn.c ----

@pytest.fixture
def builds(tmp_path, monkeypatch):
    """How often gpn.c was built: a function. The compiler is one that does not optimize; it has a folder of its own."""
    if shutil.which('cc') is None:
        pytest.skip('no C compiler here')
    compiler, log = tmp_path / 'compiler', tmp_path / 'log'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) echo >> {log};; esac\nexec cc "$@" -O0 $OPTION\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CC', str(compiler))
    monkeypatch.setattr(scan, 'KEPT', tmp_path / 'kept')
    return lambda: len(log.read_text()) if log.exists() else 0


def build():
    """As a new process does."""
    return scan._build.__wrapped__(torch.float32)


def test_the_steps_in_c_are_built_once_for_a_compiler_and_its_flags(builds, monkeypatch, tmp_path):
    assert build().steps and builds() == 1
    assert build().steps and builds() == 1
    kept, = (tmp_path / 'kept').iterdir()
    monkeypatch.setattr(scan, 'KEPT', tmp_path / 'other')
    cut_short = tmp_path / 'other' / kept.name
    cut_short.parent.mkdir()
    cut_short.write_bytes(kept.read_bytes()[:100])
    assert build().steps and builds() == 2 and len(cut_short.read_bytes()) > 1000
    monkeypatch.setenv('OPTION', '-mno-avx' if platform.machine() == 'x86_64' else '-DANOTHER')  # another CPU
    assert build().steps and builds() == 3 and len([*cut_short.parent.iterdir()]) == 2


def test_without_a_folder_to_write_to_the_steps_are_built_anew(builds, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, 'KEPT', tmp_path / 'log' / 'no folder')
    assert build().steps and build().steps and builds() == 2


def test_without_a_compiler_the_equations_run_and_one_line_says_so(builds, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('OPTION', '-no-such-option')
    assert build() is None and not (tmp_path / 'kept').exists()
    monkeypatch.setenv('CC', str(tmp_path / 'absent'))
    monkeypatch.setattr(scan, '_build', scan._build.__wrapped__)
    scan._compiles_c.__wrapped__.cache_clear()
    model, idx = make()
    assert model.fast and torch.equal(model.states(idx), model.loop(model.ground_input(idx))[0])
    assert model.new_cache(1, 9).decoder is model
    assert capsys.readouterr().err.count('\n') == 1
    scan._compiles_c.__wrapped__.cache_clear()


# ---- steps in C ----

@needs_c
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize('rows', [1, 3, 8, 21])
def test_steps_in_c_at_a_size_that_all_threads_share(rows, dtype, tolerance):
    """With rows that fill no tile, one, or some: states and gradients."""
    model, idx = wide_model(rows)
    want = loss_and_gradients(model, plain_states(model, idx), idx)
    model = model.to(dtype)
    for expected, got in zip(want, loss_and_gradients(model, model.states(idx), idx)):
        assert expected.norm() > 0 and (got - expected).norm() < tolerance * expected.norm()


def wide_model(rows):
    """Odd widths, of which the last pair is half empty."""
    model = make(n_layer=2, n_head=3, n_embd=255, n_ffn=151, d_k=33, d_v=70, eos_id=59, bptt_len=6, vocab_size=70)[0]
    for p in model.parameters():
        p.data *= 0.1 if p.dim() == 2 else 1
    torch.manual_seed(rows)
    return model, torch.randint(50, 60, (rows, 9))


def assert_bf16_products_cost_no_more_than_in_the_equations(model, idx, times=1.5):
    """Under autocast, beside float64: the error of the loss and all gradients together.

    Single gradients may nearly cancel, or pass a ReLU in one form only: their errors differ by chance, and their bound
    is wide. In fp32 and float64 it is not.
    """
    exact = loss_and_gradients(model, plain_states(model, idx), idx)
    model = model.float()
    with torch.autocast(idx.device.type, torch.bfloat16):
        of_equations, fast = plain_states(model, idx), model.states(idx)
    assert fast.dtype == torch.float32
    errors = []
    for states in (of_equations, fast):
        found = loss_and_gradients(model, states, idx)
        errors.append(torch.stack([(x - want).norm() for x, want in zip(found, exact)]))
    assert 0 < errors[1].norm() < times * errors[0].norm()
    for want, expected, error in zip(exact, *errors):
        assert want.norm() > 0 and error < 4 * expected + 0.5 * want.norm()


@needs_bf16_units
@pytest.mark.parametrize('rows', [1, 3, 8, 21])
def test_bf16_products_in_c_cost_no_more_than_in_the_equations(rows):
    assert_bf16_products_cost_no_more_than_in_the_equations(*wide_model(rows))


def steps_of(decoder, model, idx, max_run=None):
    """Predicted states of windows by a decoder, in one run, or with the states between the steps kept."""
    state = [x.unsqueeze(0) for x in decoder.first_state(len(idx))]
    return decoder.advance(state, model.ground_input(idx).to(state[0].dtype))


@needs_bf16_units
@torch.no_grad()
def test_a_model_in_bf16_decodes_in_c():
    model, idx = make(n_layer=2)
    exact = steps_of(model, model, idx)
    model = model.to(torch.bfloat16)
    decoder = scan.Decoder(model, 'cpu')
    assert decoder.weights.library is scan._build(torch.bfloat16)
    assert 0 < (steps_of(decoder, model, idx) - exact).norm() < 0.03 * exact.norm()


@needs_c
@torch.no_grad()
def test_autocast_does_not_reach_the_steps_of_decoding():
    """As train.py decodes a sample: the memory is read and written in fp32."""
    model, idx = make(n_layer=2)
    decoder, u = scan.Decoder(model.float(), 'cpu'), model.ground_input(idx)
    results = []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            results.append(decoder.advance([x.unsqueeze(0) for x in decoder.first_state(len(idx))], u))
    assert torch.equal(*results)


@needs_c
def test_a_float64_model_is_left_alone_by_autocast():
    model, idx = make(n_layer=2)
    with torch.autocast('cpu', torch.bfloat16):
        states = model.states(idx)
    torch.testing.assert_close(states, model.states(idx))


@needs_c
def test_both_forms_add_the_same_to_the_length_of_a_key():
    """Which only very short keys show."""
    model, idx = make(n_layer=2, eos_id=59)
    for p in (*model.write.key.parameters(), *model.layers[1].query.parameters()):
        p.data *= 1e-6
    exact = plain_states(model, idx)
    for want, got in zip(loss_and_gradients(model, exact, idx), loss_and_gradients(model, model.states(idx), idx)):
        assert (got - want).norm() <= 1e-8 * want.norm()
    G_l2, scan_eps = G.l2_normalize.__defaults__, scan.KEY_EPS
    assert G_l2 == (scan_eps,)


@needs_c
def test_memory_is_not_held_at_every_step():
    """What the scan holds for the backward, in bytes, is the formula in scans/gpn.py."""
    T, B, c = 64, 2, G.Config(**SMALL | dict(segment_len=8))
    model, held = G.Model(c), {}
    u = torch.zeros(T, B, c.n_embd, requires_grad=True)
    folded = [w.detach() for w in scan.fold(model)]

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scan._scan_op(u, None, folded, list(scan.Sizes.of(c)), c.norm_eps, torch.float32, 8, T, True)
    products = 2 * c.n_embd + 2 * c.n_ffn + c.n_head * (3 * c.d_v + 2 * c.d_k + 2)
    states, memories = T * B * c.n_embd, T // 8 * B * c.n_head * c.d_k * c.d_v
    # u, too
    assert sum(held.values()) == 4 * (2 * states + T * B * products + memories + sum(w.numel() for w in folded))


# ---- the kernels ----

def small_windows(dtype=torch.float64, device='cpu', **values):
    """A model and windows (2, 7), of two segments and a bit: Triton's interpreter is slow. Documents start within a
    segment, with one, and with a piece of BPTT."""
    model, idx = make(segment_len=3, **values)
    idx = idx[:2, :7].clamp(max=58)
    idx[0, 0] = idx[0, 2] = idx[1, 1] = idx[1, 3] = idx[1, 5] = 59
    return model.to(device, dtype), idx.to(device)


@needs_triton
@pytest.mark.parametrize('values', [dict(n_layer=3, bptt_len=1), dict(eos_id=59, bptt_len=4), dict(n_head=0),
                                    dict(n_layer=2, eos_id=59)], ids=str)
def test_the_scan_in_kernels_is_the_step_repeated_with_all_gradients(values, kernels_device):
    model, idx = small_windows(device=kernels_device, **values)
    want = loss_and_gradients(model, plain_states(model, idx), idx)
    for expected, got in zip(want, loss_and_gradients(model, model.states(idx), idx)):
        assert expected.norm() > 0 and (got - expected).norm() < 1e-8 * expected.norm()


@needs_triton
def test_the_scan_in_kernels_in_fp32(kernels_device):
    model, idx = small_windows(n_layer=2, eos_id=59, device=kernels_device)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() == 2 else torch.nn.init.ones_(p)
    want = loss_and_gradients(model, plain_states(model, idx), idx)
    model = model.float()
    for expected, got in zip(want, loss_and_gradients(model, model.states(idx), idx)):
        assert expected.norm() > 0 and (got - expected).norm() < 1e-4 * expected.norm()


@needs_triton
def test_bf16_products_in_kernels_cost_no_more_than_in_the_equations(kernels_device):
    """The dtypes of training on a GPU: state and memory in fp32, products and what is saved of them in bf16.

    The kernels also round the gradients of products, and the windows are short, so their error may be larger.
    """
    model, idx = small_windows(n_layer=2, eos_id=59, device=kernels_device)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() == 2 else torch.nn.init.ones_(p)
    assert_bf16_products_cost_no_more_than_in_the_equations(model, idx, times=3)


@needs_triton
def test_decoding_in_kernels_is_the_step_repeated(kernels_device):
    decoding_is_the_step_repeated('in kernels', kernels_device, torch.float64, 1e-8, n_layer=2)


class Rerun:
    """Stands for a CUDA graph: the same tensors go in and come out each time."""

    def __init__(self, function, inputs):
        self.function = function
        self.inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(self.inputs, inputs):
            if isinstance(own, torch.Tensor):
                own.copy_(x)
        results = self.function(*self.inputs)
        for own, x in zip(*map(tree_leaves, (self.results, results))):
            if own is not None:
                own.copy_(x)
        return self.results


@needs_triton
@pytest.mark.parametrize('values', [dict(n_head=0), dict(eos_id=59, bptt_len=6)], ids=str)
def test_graphs_of_segments_give_what_the_steps_do(values, kernels_device, monkeypatch):
    """Two models of one shape share the graphs, the forward of one between forward and backward of the other, and
    evaluation uses them too."""
    pairs = [small_windows(torch.float32, kernels_device, **values) for _ in range(2)]
    models, idx = [model for model, _ in pairs], pairs[0][1]
    for p in models[1].parameters():
        p.data *= 0.8

    def run(model):
        loss = model.states(idx).square().sum()
        weights = {name: p for name, p in model.named_parameters() if not name.startswith(('norm', 'decode'))}
        return dict(zip(['loss', *weights], [loss, *torch.autograd.grad(loss, list(weights.values()))]))

    monkeypatch.setattr(scan, 'USE_GRAPHS', False)
    want = [run(model) for model in models]
    monkeypatch.setattr(scan, 'USE_GRAPHS', True)
    if kernels_device == 'cpu':
        monkeypatch.setattr(scan, 'Graph', Rerun)
        monkeypatch.setattr(scan, 'uses_graphs', lambda device: True)
    scan._kernels_of.cache_clear()
    with torch.inference_mode():
        models[0].states(idx)
    before = models[0].states(idx).square().sum()
    for _ in range(2):
        for model, expected in zip(models, want):
            for name, got in run(model).items():
                size = expected[name].abs().max().item()
                torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5 * size)
    before.backward()
    torch.testing.assert_close(models[0].fuse.weight.grad, want[0]['fuse.weight'], rtol=1e-4, atol=1e-4)
    assert scan._kernels_of.cache_info().currsize == 1
    scan._kernels_of.cache_clear()


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would be given."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        launches = not function.is_view and not any(name in str(function) for name in ('empty', 'promote_types'))
        self.count += launches
        return function(*args, **kwargs or {})


def launches_of_a_token(monkeypatch, backward, documents, **values):
    """From segments of 3 and of 2 steps: how many more the longer one has."""
    monkeypatch.setattr(attn_kernels, 'KERNELS_ON_CPU', True)
    model, _ = make(**values)
    model, c, counts = model.float(), model.config, []
    w = scan.KernelSteps(scan.fold(model), scan.Sizes.of(c), c.norm_eps, torch.bfloat16)
    for S in (2, 3):
        u, carry = torch.zeros(S, 2, c.n_embd), torch.ones(S, 2, 1) if documents else None
        s, k, memory = torch.zeros(1, 2, c.n_embd), w.first_key.repeat(1, 2, 1, 1), torch.zeros(1, 2, c.n_head, 8, 12)
        launches = Launches()

        def launch(*args):
            launches.count += 1
        monkeypatch.setattr(scan, '_launch', launch)
        outputs = w.steps(s, k, memory, u, carry)[3]
        launches.count = 0
        with torch.no_grad(), launches:
            if backward:
                saved = [x for i, x in enumerate(outputs) if i != c.n_layer - 1]
                w.backward(False, u, carry, u, k[0], memory[0], u, s[0], k[0].clone(), memory[0].clone(), *saved)
            else:
                w.steps(s, k, memory, u, carry)
        counts.append(launches.count)
    return counts[1] - counts[0]


@needs_triton
@pytest.mark.parametrize('values', [{}, dict(n_layer=2), dict(n_head=0, n_layer=2)], ids=str)
@pytest.mark.parametrize('backward', [False, True])
def test_documents_cost_no_launches(values, backward, monkeypatch):
    """And what bench.gpn counts on."""
    want = bounds(scan.Sizes.of(G.Config(**SMALL | values)), 2)[backward]['launches']
    for documents in (False, True):
        assert launches_of_a_token(monkeypatch, backward, documents, **values) == want


# ---- the pieces of a step, in Triton's interpreter ----

def reference_delta_step(memory, k, v, decay, beta, q, carry=None):
    """The gated delta rule as its definition -> the new memory, and what q reads from it."""
    if carry is not None:
        memory = memory * carry[..., None, None]
    error = v - torch.einsum('bhkd,bhk->bhd', memory, k)
    memory = decay[..., None, None] * memory + beta[..., None, None] * torch.einsum('bhk,bhd->bhkd', k, error)
    return memory, torch.einsum('bhkd,bhk->bhd', memory, q)


@needs_triton
@pytest.mark.parametrize('shape', [(3, 2, 2, 8, 12), (2, 1, 1, 1, 1), (3, 1, 2, 33, 70)])
@pytest.mark.parametrize('with_documents', [False, True])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_delta_kernels_equal_their_definition(shape, with_documents, dtype, tolerance, kernels_device):
    """Writes and reads of S steps, and their gradients, beside autograd through the definition in float64."""
    torch.manual_seed(0)
    S, B, H, K, D = shape
    options = dict(device=kernels_device, dtype=dtype)
    k, q = (F.normalize(torch.randn(S, B, H, K, **options).relu() + 0.1, dim=-1) for _ in range(2))
    v, to_read = torch.randn(2, S, B, H, D, **options)
    log_decay, beta = -torch.rand(S, B, H, **options), torch.rand(S, B, H, **options)
    memory, to_memory = torch.randn(2, B, H, K, D, **options)
    first_key = torch.rand(H, K, **options)
    carry = (torch.rand(S, B, 1, device=kernels_device) > 0.4).to(dtype) if with_documents else None
    carries = [None] * S if carry is None else carry
    used = k if carry is None else torch.where(carry.unsqueeze(-1) > 0, k, first_key)

    exact = [x.double().requires_grad_() for x in (q, used, v, beta, log_decay, memory)]
    q64, k64, v64, beta64, log64, m = exact
    reads = []
    for t in range(S):
        now = None if carry is None else carry[t].double()
        m, read = reference_delta_step(m, k64[t], v64[t], log64[t].exp(), beta64[t], q64[t], now)
        reads.append(read)
    (torch.stack(reads) * to_read).sum().add((m * to_memory).sum()).backward()

    decay, now, got = log_decay.exp(), memory.clone(), []
    for t in range(S):
        after = torch.empty_like(now)
        got.append(scan.delta_step(now, after, k[t], v[t], decay[t], beta[t], q[t], carries[t], first_key))
        now = after
    memories = scan.delta_replay(memory, used, v, decay, beta, carry)
    assert_close([torch.stack(got), now, memories[-1]], [torch.stack(reads), m, m], tolerance)
    grad, grads = to_memory.clone(), []
    for t in reversed(range(S)):
        inputs = memories[t], used[t], v[t], decay[t], beta[t], q[t], to_read[t], carries[t]
        grads.append(scan.delta_step_backward(grad, *inputs))
    assert_close([torch.stack(x[::-1]) for x in zip(*grads)] + [grad], [x.grad for x in exact], tolerance)


@needs_triton
@pytest.mark.parametrize('reads, N, C, H, K, D', [(True, 3, 20, 2, 8, 12), (False, 1, 1, 1, 1, 1),
                                                  (True, 5, 70, 3, 33, 130)])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_pieces_equal_their_definitions(reads, N, C, H, K, D, dtype, tolerance, kernels_device):
    """With their gradients, beside float64 and autograd; z are columns of a wider tensor."""
    torch.manual_seed(0)
    wide, device = torch.promote_types(dtype, torch.float32), kernels_device

    def random(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)

    def columns(width):
        return random(N, width + 7)[:, 3:width + 3]

    def unit(x, eps):
        return x / (x.square().sum(-1, keepdim=True) + eps ** 2).sqrt()

    def expect(definition, inputs, cotangents):
        inputs = [x.double().clone().requires_grad_() for x in inputs]
        outputs = definition(*inputs)
        return outputs, torch.autograd.grad(outputs, inputs, [x.double() for x in cotangents])

    z, x, add, d, dn = columns(C), random(N, C).to(wide), columns(C), random(N, C).to(wide), random(N, C)
    carry = (torch.rand(N, 1, device=device) > 0.4).to(wide)
    for now in (None, carry):
        a = 1 if now is None else now.double()
        want = expect(lambda z, x, add: [y := torch.sigmoid(z) * a * x + add, unit(y, 0.3)], [z, x, add], [d, d])[0]
        assert_close(scan.gated_add_norm(z, x, add, 0.3, dtype, now), want, tolerance)
        gate, (n, length) = torch.sigmoid(z.to(wide)), scan.l2_normalize(x, 0.3)
        want = expect(lambda x: [unit(x, 0.3), gate.double() * x], [x], [dn, d])[1]
        got = scan.gated_add_norm_backward(dn, n, 1 / length, d, gate, now)
        assert_close([got], [want[0] * a], tolerance)

    n = H * D if reads else 0
    z, out, read = columns(2 * C + n), columns(2 * C + n), random(N, n).to(wide) if reads else None
    dy, y = random(N, C + n), random(N, C + n)
    both = expect(lambda z, *a: [F.silu(z[:, :C + n]) * torch.cat([z[:, C + n:], *(unit(x, 0.3) for x in a)], 1)],
                  [z] + [read] * reads, [dy])
    assert_close([scan.glu(z, read, 0.3, dtype)], both[0], tolerance)
    grads = [out, scan.glu_backward(dy, z, read, 0.3, out, y)]
    assert_close([y, *grads[:1 + reads]], [*both[0], *both[1]], tolerance)

    rate, z, out = random(H).to(wide).exp(), columns(H * (2 * K + D + 2)), columns(H * (2 * K + D + 2))
    cotangents = [random(N, H, *shape).to(wide) for shape in ((K,), (K,), (D,), (), ())]

    def definition(z, rate):
        q, k, v, beta, decay = z.split([H * K, H * K, H * D, H, H], 1)
        q, k = (unit(x.relu().unflatten(1, (H, K)), scan.KEY_EPS) for x in (q, k))
        return [q, k, v.unflatten(1, (H, D)), -rate * F.softplus(decay), torch.sigmoid(beta)]

    q, k, v, log, beta = definition(z.double(), rate.double())
    assert_close(scan.memory_inputs(z, rate, H, K), [q, k, v, log.exp(), beta], tolerance)
    dq, dk, dv, dlog, dbeta = cotangents
    for then in (None, carry):
        weight = 1 if then is None else then.unsqueeze(-1)
        dz, drate = expect(definition, [z, rate], [dq, weight * dk, dv, dlog, dbeta])[1]
        grad_rate = torch.empty(N, H, device=device, dtype=wide)
        scan.memory_inputs_backward(z, rate, out, dq, dk, dv, dbeta, dlog, grad_rate, then)
        assert_close([grad_rate.sum(0), out], [drate, dz], tolerance)
    z, out = z[:, :H * K], out[:, :H * K]
    assert_close(scan.memory_inputs(z, None, H, K)[:1], [q], tolerance)
    scan.memory_inputs_backward(z, None, out, dq)
    assert_close([out], [dz[:, :H * K]], tolerance)


COMPILE = '''
import os, subprocess, sys, tempfile, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import attn_kernels
attn_kernels.KERNELS_ON_CPU = True
from scans import gpn as scan

TYPES = {torch.bfloat16: '*bf16', torch.float32: '*fp32', torch.float64: '*fp64', int: 'i32'}
done = {}

def launch(kernel, grid, warps, *args):
    """Compiles the kernel for an H100 in place of a launch."""
    fixed = [p.is_constexpr or x is None or isinstance(x, int) and x == 1 for p, x in zip(kernel.params, args)]
    signature = {p.name: 'constexpr' if f else TYPES[x.dtype if isinstance(x, torch.Tensor) else type(x)]
                 for p, x, f in zip(kernel.params, args, fixed)}
    constants = {(i,): x for i, (x, f) in enumerate(zip(args, fixed)) if f}
    aligned = [x.storage_offset() * x.itemsize % 16 == 0 if isinstance(x, torch.Tensor) else not f and x % 16 == 0
               for x, f in zip(args, fixed)]  # as a launch finds it
    attributes = {(i,): [['tt.divisibility', 16]] for i, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    key = kernel.__name__, *signature.values(), *constants.values()
    if key not in done:
        built = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=dict(num_warps=warps, num_stages=1))
        with tempfile.NamedTemporaryFile() as file:
            file.write(built.asm['cubin'])
            file.flush()
            tool = os.path.join(os.path.dirname(triton.__file__), 'backends/nvidia/bin/cuobjdump')
            done[key] = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True).stdout
        assert 'STACK:0 ' in done[key] and built.metadata.shared <= 232448, (key, done[key])

scan._launch, B, S, L = launch, 2, 2, 2
for documents, dtype, sizes in ((False, torch.bfloat16, (2496, 6656, 15, 128, 256)),
                                (True, torch.float32, (2496, 6656, 15, 128, 256)),
                                (True, torch.bfloat16, (3184, 8448, 0, 128, 256))):
    C, n_ffn, H, K, D = sizes
    sizes, full = scan.Sizes(*sizes, L), lambda *shape: torch.empty(shape, device='meta')
    shapes = [(C, C), (C,)]
    for i in range(L):
        shapes += [(sum(sizes.columns(i)), C), (sum(sizes.columns(i)),), (C, n_ffn + H * D)]
    w = scan.KernelSteps([full(*shape) for shape in (*shapes, (H,), (H, K))], sizes, 1e-6, dtype)
    carry, u, k, memory = full(S, B, 1) if documents else None, full(S, B, C), full(B, H, K), full(B, H, K, D)
    outputs = w.steps(u[:1], k[None], memory[None], u, carry)[3]
    saved = [x for i, x in enumerate(outputs) if i != L - 1]
    w.backward(False, u, carry, u, k, memory, u, u[0], k, memory, *saved)
print(*sorted({key[0] for key in done}))
'''


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_an_h100_at_the_papers_sizes_and_spill_nothing():
    result = subprocess.run([sys.executable, '-c', COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    names = {name for name in vars(scan) if name.endswith('_kernel')}
    assert set(result.stdout.split()) == names and len(names) == 8


# ---- compiled ----

@pytest.mark.slow
def test_a_compiled_model_trains_by_the_loop_to_the_same_numbers():
    """torch.compile meets one call of the loop; inside it `step` alone is compiled, once for each kind of inputs."""
    model, idx = make(eos_id=59, bptt_len=4, segment_len=3, scan='loop')
    idx = idx[:, :6]
    want = model(idx, idx)['loss']
    want = torch.autograd.grad(want, list(model.parameters()))
    torch._dynamo.reset()
    counters, graphs, compiled = torch._dynamo.utils.counters, [], torch.compile(model, backend='aot_eager')
    counters.clear()
    for _ in range(2):
        got = compiled(idx, idx)['loss']
        for a, b in zip(torch.autograd.grad(got, list(model.parameters())), want):
            assert (a - b).norm() <= 1e-10 * b.norm()
        graphs.append(counters['stats']['unique_graphs'])
    assert 0 < graphs[0] <= 8 and graphs[1] == graphs[0]


@needs_triton
@pytest.mark.slow
def test_the_states_compile_to_one_graph(kernels_device):
    model, idx = small_windows(torch.float32, kernels_device, eos_id=59)
    want = model.states(idx)
    got = torch.compile(model.states, backend='aot_eager', fullgraph=True)(idx)
    torch.testing.assert_close(got, want)
    weights = [p for name, p in model.named_parameters() if not name.startswith(('norm', 'decode'))]
    for a, b in zip(torch.autograd.grad(got.sum(), weights), torch.autograd.grad(want.sum(), weights)):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_operators_return_what_their_fake_forms_say(monkeypatch):
    calls = []
    for name in ('_scan_op', '_scan_backward_op'):
        operator = getattr(scan, name)
        monkeypatch.setattr(scan, name, lambda *args, op=operator: (calls.append((op, args)), op(*args))[1])
    model, idx = make(n_layer=2)
    model.float().states(idx).sum().backward()
    assert len(calls) == 2
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=('test_schema', 'test_faketensor'))


@pytest.mark.slow
def test_the_bench_runs_at_toy_size(capsys):
    from bench import gpn
    gpn.main(['--toy'])
    said = capsys.readouterr().out
    assert all(name in said for name in (['tokens_per_s']
                                         if torch.cuda.is_available() else ['loop_peak_growth_mb', 'plain over']))
    with pytest.raises(SystemExit):
        gpn.main(['--teapot'])
