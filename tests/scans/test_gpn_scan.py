"""scans/gpn.py: Triton kernels against the equations, in float64 by default."""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import saved_bytes
from references import assert_near, loss_and_gradients
from test_gpn import SMALL, make, needs_triton, plain_states, results, scale_keys
from torch.utils._pytree import tree_leaves, tree_map

import model_gpn as G
from scans import gpn as scan
from scans import gpn_gpu

in_kernels = lambda test: needs_triton(pytest.mark.slow(test))
AFTER_STATE = 'norm', 'decode'  # weights between the state and the logits
def assert_bf16_errors_are_like_those_of_the_equations(model, idx, times=1.5):
    """Compare errors under autocast, relative to float64, of the loss and all gradients together.

    Single gradients have a wide bound: they may nearly cancel, or pass a ReLU in one form only.
    """
    exact = results(model, plain_states(model, idx), idx)
    model = model.float()
    with torch.autocast(idx.device.type, torch.bfloat16):
        of_equations, fast = plain_states(model, idx), model.states(idx)
    assert fast.dtype == torch.float32
    errors = []
    for states in (of_equations, fast):
        found = results(model, states, idx)
        errors.append(torch.stack([(found[name] - want).norm() for name, want in exact.items()]))
    assert 0 < errors[1].norm() < times * errors[0].norm()
    for want, expected, error in zip(exact.values(), *errors):
        assert want.norm() > 0 and error < 4 * expected + 0.5 * want.norm()


# ---- the kernels ----

def random(*shape, device='cpu'):
    """Return random values, as columns of a wider tensor if they are a matrix."""
    x = torch.randn(*shape[:-1], shape[-1] + 3, dtype=torch.float64, device=device)
    return (x[..., 2:-1] if len(shape) == 2 else x[..., :-3].contiguous()).requires_grad_()


def assert_equal(have, want):
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@in_kernels
@pytest.mark.parametrize('n_read', [0, 45])
def test_glu_kernels_equal_the_plain_function(n_read, kernels_device):
    N, n_ffn = 5, 37
    z, read = (random(N, n, device=kernels_device) for n in (2 * n_ffn + n_read, n_read))
    want = gpn_gpu.glu(z, read, 0.1, z.dtype)
    read = read.contiguous()
    assert_equal([gpn_gpu.launch_glu(z, read, 0.1, z.dtype)], [want])
    grad, dz, y = torch.randn_like(want), torch.zeros_like(z), torch.zeros_like(want)
    dread = gpn_gpu.launch_glu_backward(grad, z, read, 0.1, dz, y)
    assert_equal([dz, dread, y], [*torch.autograd.grad(gpn_gpu.glu(z, read, 0.1, z.dtype), (z, read), grad), want])


@in_kernels
@pytest.mark.parametrize('writes', [True, False])
def test_memory_input_kernels_equal_the_plain_function(writes, kernels_device):
    N, H, K, D = 5, 3, 7, 10
    z = random(N, H * (2 * K + D + 2) if writes else H * K, device=kernels_device)
    rates = random(2, H, device=kernels_device).detach().abs().contiguous() if writes else None
    rate = rates[0].repeat(N, 1).requires_grad_() if writes else None
    of_rows = [rate, rates[1]] if writes else None
    sizes, carry = (H, K, D, 0.1), (torch.arange(N, device=kernels_device) % 2).double().unsqueeze(1)
    want = gpn_gpu.memory_inputs(z, of_rows, sizes)
    assert_equal(gpn_gpu.launch_memory_inputs(z, rates, sizes), want)
    grads, dz, drate = [*map(torch.randn_like, want)], torch.zeros_like(z), None
    results = want[:1]
    if writes:
        q, k, v, beta, decay = want
        results, drate = [q, k * carry.unsqueeze(-1), v, beta, decay.log()], torch.zeros_like(rate)
    gpn_gpu.launch_memory_inputs_backward(z, rates, sizes, dz, grads, drate, carry)
    assert_equal([dz, drate][:1 + writes], torch.autograd.grad(results, [z, rate][:1 + writes], grads))


@in_kernels
@pytest.mark.parametrize('documents', [True, False])
def test_delta_kernels_equal_the_plain_function(documents, kernels_device):
    """Value columns that fill one tile and a part of another."""
    B, H, K, D = 3, 2, 7, 45
    memory, q, k, v, beta, decay, grad_read = (random(B, H, *shape, device=kernels_device).contiguous() for shape in (
        (K, D), (K,), (K,), (D,), (), (), (D,)))
    carry, first_key = None, random(H, K, device=kernels_device).contiguous()
    if documents:
        carry = (torch.arange(B, device=kernels_device) % 2).double().unsqueeze(1)
    want = gpn_gpu.delta_step(memory, (k, v, beta, decay), q, carry, first_key)
    after = torch.empty_like(memory)
    read = gpn_gpu.launch_delta_step(memory, after, (k, v, beta, decay), q, carry, first_key)
    assert_equal([after, read], want)
    key = k if carry is None else torch.where(carry.unsqueeze(-1) > 0, k, first_key).detach().requires_grad_()
    result, inputs = gpn_gpu.delta_step(memory, (key, v, beta, decay), q, carry, key), (memory, q, key, v, beta, decay)
    grad = torch.randn_like(memory)
    *grads, grad_decay = torch.autograd.grad(result, inputs, (grad, grad_read))
    got = gpn_gpu.launch_delta_step_backward(grad, memory, (key, v, beta, decay), q, grad_read, carry)
    assert_equal([grad, *got], [*grads, grad_decay * decay])


def test_the_backward_of_a_gate_and_norm_equals_autograd():
    x, z, grad, grad_y = (random(5, 30) for _ in range(4))
    carry, gate = (torch.arange(5) % 2).double().unsqueeze(1), z.sigmoid()
    normed, length = gpn_gpu.l2_normalize(x, 0.1)
    want, = torch.autograd.grad((normed, gate * x), x, (grad, grad_y), retain_graph=True)
    got = gpn_gpu.norm_and_gate_backward(grad, normed, 1 / length, grad_y, gate, carry)
    assert_equal([got], [carry * want])
    y, normed = gpn_gpu.gated_add_norm(z, x, grad, 0.1, x.dtype, carry)
    assert_equal([y, normed], [grad + gate * carry * x, gpn_gpu.l2_normalize(y, 0.1)[0]])


def small_windows(dtype=torch.float64, device='cpu', **values):
    """Return a model and short windows (2, 7) of several segments: Triton's interpreter is slow."""
    model, idx = make(scan='fast', segment_len=3, **values)
    idx = idx[:2, :7].clamp(max=58)
    idx[0, 0] = idx[0, 2] = idx[1, 1] = idx[1, 3] = idx[1, 5] = 59
    return model.to(device, dtype), idx.to(device)


def set_small_weights(model):
    """Set weights small enough for meaningful results in 32 and 16 bits."""
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() == 2 else torch.nn.init.ones_(p)


@in_kernels
@pytest.mark.parametrize('values', [dict(n_layer=2, bptt_len=1), dict(eos_id=59, bptt_len=4), dict(n_head=0),
                                    dict(n_layer=2, eos_id=59), dict(n_layer=2, eos_id=59, dtype=torch.float32),
                                    dict(n_embd=70, n_head=3, d_k=33, d_v=130, n_ffn=151, eos_id=59)], ids=str)
def test_the_triton_scan_equals_repeated_steps_with_gradients(values, kernels_device):
    """Odd sizes: value columns that fill one tile and a part of another. There, keys are tiny."""
    dtype, tolerance = values.get('dtype', torch.float64), 1e-4 if 'dtype' in values else 1e-8
    model, idx = small_windows(device=kernels_device, **values | dict(dtype=torch.float64))
    if dtype == torch.float32:
        set_small_weights(model)
    if 'd_k' in values:
        scale_keys(model, 1e-6)
    want = results(model, plain_states(model, idx), idx)
    model = model.to(dtype)
    assert_near(results(model, model.states(idx), idx), want, tolerance)


@in_kernels
def test_bf16_errors_in_triton_are_like_those_of_the_equations(kernels_device):
    """As in training on a GPU: state and memory in fp32, products and saved products in bf16.

    The kernels also round the gradients of products, so a larger error is allowed.
    """
    model, idx = small_windows(n_layer=2, eos_id=59, device=kernels_device)
    set_small_weights(model)
    assert_bf16_errors_are_like_those_of_the_equations(model, idx, times=3)


@in_kernels
def test_the_bias_of_the_decay_is_not_rounded_to_bf16(kernels_device):
    model, _ = small_windows(torch.float32, kernels_device)
    write, c = model.write, model.config
    torch.nn.init.zeros_(write.decay.weight)
    torch.nn.init.constant_(write.dt_bias, -6.9)  # a slow head's
    sizes = scan.Sizes.from_config(c)
    steps = gpn_gpu.KernelSteps(scan.fold(model), sizes, c.norm_eps, torch.bfloat16)
    z = F.linear(torch.randn(3, c.n_embd, device=kernels_device).bfloat16(), *steps.layers[0][:2])
    decay = gpn_gpu.launch_memory_inputs(z.split(sizes.columns(0), -1)[1], steps.rates, steps.heads)[4]
    want = write.log_decay(torch.zeros(3, c.n_embd, device=kernels_device))
    torch.testing.assert_close(decay.log(), want, rtol=1e-3, atol=1e-6)


@in_kernels
def test_saved_tensors_follow_the_documented_formula(kernels_device):
    """The bytes saved for the backward equal the formula in scans/gpn.py."""
    T, B, c = 16, 2, G.Config(**SMALL | dict(segment_len=8))
    model = G.Model(c).to(kernels_device)
    u = torch.zeros(T, B, c.n_embd, requires_grad=True, device=kernels_device)
    folded, sizes = [w.detach() for w in scan.fold(model)], list(scan.Sizes.from_config(c))
    held = saved_bytes(lambda: scan._scan_op(u, None, folded, sizes, c.norm_eps, torch.float32, True))
    products = 2 * c.n_embd + 2 * c.n_ffn + c.n_head * (3 * c.d_v + 2 * c.d_k + 2)
    states, memories = T * B * c.n_embd, T // 8 * B * c.n_head * c.d_k * c.d_v
    assert held == 4 * (2 * states + T * B * products + memories + sum(w.numel() for w in folded))  # 2: states and u


class Rerun(gpn_gpu.Graph):
    """Stand-in for a CUDA graph, with the same input and output tensors on each replay."""

    def __init__(self, function, inputs):
        def rerun():
            for own, x in zip(*map(tree_leaves, (self.results, function(*self.inputs)))):
                if own is not None:
                    own.copy_(x)

        self.inputs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
        self.results, self.graph = function(*self.inputs), SimpleNamespace(replay=rerun)


@in_kernels
@pytest.mark.parametrize('values', [dict(n_head=0), dict(eos_id=59, bptt_len=4)], ids=str)
def test_recorded_graphs_give_the_results_of_the_steps(values, kernels_device, monkeypatch):
    """Two models of one shape share graphs in interleaved calls, and evaluation uses them too."""
    pairs = [small_windows(torch.float32, kernels_device, **values) for _ in range(2)]
    models, idx = [model for model, _ in pairs], pairs[0][1][:, :5]
    for p in models[1].parameters():
        p.data *= 0.8

    def loss(model):
        return model.states(idx).square().sum()

    monkeypatch.setattr(scan, 'uses_graphs', lambda device: False)
    want = [loss_and_gradients(loss(model), model, AFTER_STATE) for model in models]
    monkeypatch.setattr(scan, 'uses_graphs', lambda device: True)
    if kernels_device == 'cpu':
        monkeypatch.setattr(scan, 'Graph', Rerun)
    scan._kernels_of.cache_clear()
    with torch.inference_mode():
        models[0].states(idx)
    before = loss(models[0])
    for i in (0, 1, 0):
        assert_near(loss_and_gradients(loss(models[i]), models[i], AFTER_STATE), want[i], 1e-4)
    assert_near(loss_and_gradients(before, models[0], AFTER_STATE), want[0], 1e-4)
    assert scan._kernels_of.cache_info().currsize == 1
    scan._kernels_of.cache_clear()


# ---- compiled ----

@in_kernels
def test_the_states_compile_to_one_graph(kernels_device):
    model, idx = small_windows(torch.float32, kernels_device, eos_id=59)
    want = model.states(idx)
    got = torch.compile(model.states, backend='aot_eager', fullgraph=True)(idx)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(loss_and_gradients(x.sum(), model, AFTER_STATE) for x in (got, want)))


@in_kernels
def test_operators_match_their_fake_implementations(monkeypatch, kernels_device):
    calls = []
    for name in ('_scan_op', '_scan_backward_op'):
        operator = getattr(scan, name)
        monkeypatch.setattr(scan, name, lambda *args, op=operator: (calls.append((op, args)), op(*args))[1])
    model, idx = small_windows(torch.float32, kernels_device, n_layer=2)
    model.states(idx).sum().backward()
    assert len(calls) == 2
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=('test_schema', 'test_faketensor'))
