"""scans/delta.py: Triton kernels against the equations of model_gpn.py, alone and in scans."""
import copy
import re

import pytest
import torch
from references import assert_near
from test_gpn import SMALL, make, needs_triton, plain_states, results, scale_keys

import model_gpn as G
import scans
from scans import delta

in_kernels = lambda test: needs_triton(pytest.mark.slow(test))


def random_inputs(device, B=3, H=2, K=7, D=45):
    shapes = (K, D), (K,), (D,), (), (), (K,)
    return [torch.randn(B, H, *shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]


@in_kernels
@pytest.mark.parametrize('sizes', [dict(), dict(K=8, D=64), dict(H=1, K=5, D=3)], ids=str)
@pytest.mark.parametrize('known', [False, True])
def test_kernels_equal_the_plain_function(known, sizes, kernels_device):
    """Value columns that fill tiles, and parts of them. A known read has the same gradients."""
    inputs = random_inputs(kernels_device, **sizes)
    want = G.delta_rule(*inputs)
    got = delta.kernels(*inputs, known=want[1].detach() if known else None)
    grads = [torch.randn_like(x) for x in want]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads),
                               rtol=1e-10, atol=1e-10)


@in_kernels
def test_a_nan_key_or_query_gives_nan(kernels_device):
    memory, k, v, beta, decay, q = (x.detach() for x in random_inputs(kernels_device))
    k[:, 0], q[:, 1] = float('nan'), float('nan')
    new, read = delta.kernels(memory, k, v, beta, decay, q)
    assert new[:, 0].isnan().all() and read.isnan().all() and not new[:, 1].isnan().any()


@in_kernels
def test_operators_match_their_fake_implementations(kernels_device):
    inputs = [x.detach() for x in random_inputs(kernels_device)]
    for operator, args in ((delta._forward_op, inputs), (delta._forward_op, [*inputs[:-1], None]),
                           (delta._backward_op, [torch.randn_like(x) for x in G.delta_rule(*inputs)] + inputs)):
        torch.library.opcheck(operator, args, test_utils=('test_schema', 'test_faketensor'))


def small_windows(dtype=torch.float64, device='cpu', **values):
    """Return a model and short windows (2, 7) of several segments: Triton's interpreter is slow."""
    model, idx = make(segment_len=3, **values)
    idx = idx[:2, :7].clamp(max=58)
    idx[0, 0] = idx[0, 2] = idx[1, 1] = idx[1, 3] = idx[1, 5] = 59
    return model.to(device, dtype), idx.to(device)


def set_small_weights(model):
    """Set weights small enough for meaningful results in 32 and 16 bits."""
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() == 2 else torch.nn.init.ones_(p)


def equations(model, idx):
    """Return the loss and gradients of the plain equations."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.delta_rule = G.delta_rule
    return results(model, plain_states(model, idx), idx)


@in_kernels
@pytest.mark.parametrize('values', [dict(n_layer=2, eos_id=59, bptt_len=4), dict(n_head=0),
                                    dict(n_layer=2, eos_id=59, dtype=torch.float32),
                                    dict(d_k=9, d_v=45, eos_id=59)], ids=str)
def test_scans_equal_repeated_steps_with_gradients(values, kernels_device, gpu_form):
    dtype, tolerance = values.get('dtype', torch.float64), 1e-4 if 'dtype' in values else 1e-8
    model, idx = small_windows(device=kernels_device, **values | dict(dtype=torch.float64))
    if dtype == torch.float32:
        set_small_weights(model)
    if 'd_k' in values:
        scale_keys(model, 1e-6)
    want = equations(model, idx)
    model = model.to(dtype)
    assert_near(results(model, model.states(idx, use_scan=True), idx), want, tolerance)


@in_kernels
def test_bf16_errors_are_like_those_of_the_equations(kernels_device, gpu_form):
    """As in training on a GPU: state and memory in fp32, products in bf16.

    Compares errors relative to float64, of the loss and all gradients together. Gradients of
    products are rounded too, so a larger error is allowed. Single gradients have a wide bound: they
    may nearly cancel, or pass a ReLU in one form only.
    """
    model, idx = small_windows(n_layer=2, eos_id=59, device=kernels_device)
    set_small_weights(model)
    exact = equations(model, idx)
    model = model.float()
    with torch.autocast(idx.device.type, torch.bfloat16):
        of_equations, states = equations(model, idx), model.states(idx, use_scan=True)
    recurrence, = model._recurrences.values()
    assert states.dtype == torch.float32 and recurrence.fixed[0].dtype == torch.bfloat16
    errors = []
    for found in (of_equations, results(model, states, idx)):
        errors.append(torch.stack([(found[name] - want).norm() for name, want in exact.items()]))
    assert 0 < errors[1].norm() < 3 * errors[0].norm()
    for want, expected, error in zip(exact.values(), *errors):
        assert want.norm() > 0 and error < 4 * expected + 0.5 * want.norm()


@needs_triton
@pytest.mark.parametrize('edit', [('error = v - read(memory, k)', 'error = v'), ('.sum(-2)', '.mean(-2)'),
                                  ('l2_normalize(F.relu(x))', 'F.relu(x)'), ('eps ** 2', 'eps')])
def test_an_edit_runs_without_the_kernels_until_it_is_pinned(edit, import_edited, monkeypatch, capsys):
    scans.warn_once.cache_clear()
    file = import_edited('gpn', lambda source: source.replace(*edit))
    make = lambda **values: file.Model(file.Config(**SMALL | values)).layers[0].delta_rule
    assert make(scan='loop') is file.delta_rule and capsys.readouterr().err == ''
    assert make() is file.delta_rule
    pin = re.search(r"model_edited.delta_rule was edited.* add '(\w+)' to PINS", capsys.readouterr().err)[1]
    monkeypatch.setattr(delta, 'PINS', {pin})
    assert make() is not file.delta_rule and capsys.readouterr().err == ''


def test_unedited_equations_have_kernels(capsys):
    scans.warn_once.cache_clear()
    model = G.Model(G.Config(**SMALL))
    assert (model.layers[0].delta_rule is not G.delta_rule) == (scans.triton is not None)
    inputs = random_inputs('cpu')
    torch.testing.assert_close(model.layers[0].delta_rule(*inputs), G.delta_rule(*inputs))
    assert capsys.readouterr().err == ''
