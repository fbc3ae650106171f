"""Weights of 8 bits: the products are what they say, decoding keeps the model's contract, and the scripts tell."""
import json

import pytest
import torch
import torch.nn as nn
from conftest import assert_sentence, run, train_tiny
from test_models import make, some_tokens

import attn_kernels
from common import int8
from common.files import UserError
from common.scoring import loss_from_logits

needs_product = pytest.mark.skipif(not int8.has_cpu_product(), reason='needs a CPU and a PyTorch with 8-bit products')


def rounded(x):
    """x (..., K) as rows of whole numbers in -127 ... 127 times a scale each, in float64."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


def linear_and_vectors():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(2, 5, 64)
    x[0, 0] *= 1000  # whose scale must not be the others'
    with torch.no_grad():
        layer.weight[3] *= 1000
    return layer, x


@needs_product
def test_a_product_is_that_of_rows_rounded_to_8_bits_each_with_its_own_scale():
    layer, x = linear_and_vectors()
    want = rounded(x) @ rounded(layer.weight.detach()).T + layer.bias.double()
    got = int8.quantize(layer)(x)
    assert got.shape == (2, 5, 48) and got.dtype == torch.float32
    assert ((got - want).abs() <= 1e-5 * want.abs().amax(-1, keepdim=True)).all()
    assert layer(x[:, 2]).equal(got[:, 2])  # whatever is multiplied beside it
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer(torch.zeros(2, 64)).equal(layer.bias.expand(2, 48))


def test_without_such_a_product_only_the_weights_are_rounded(monkeypatch):
    monkeypatch.setattr(int8, 'has_cpu_product', lambda: False)
    layer, x = linear_and_vectors()
    want = x.double() @ rounded(layer.weight.detach()).T + layer.bias.double()
    got = int8.quantize(layer)(x)
    assert ((got - want).abs() <= 1e-5 * want.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize('bad', [float('inf'), float('nan')])
@pytest.mark.parametrize('where', ['weight', 'vector'])
def test_numbers_that_are_not_finite_show(bad, where):
    layer, x = linear_and_vectors()
    with torch.no_grad():
        (layer.weight if where == 'weight' else x[0])[1, 2] = bad
    y = int8.quantize(layer)(x)
    assert not (y[..., 1] if where == 'weight' else y[0, 1]).isfinite().any()


@needs_product
@pytest.mark.parametrize('variant', ['standard, documents', 'standard, grouped queries', 'sps', 'context_ready, tied',
                                     'nextlat, documents, tied', 'jtp, documents', 'bst', 'gdn, documents'])
def test_cached_decoding_gives_the_quantized_models_own_logits(variant):
    model = make(variant).double()  # in fp32 noise moves some number over the edge between two of the 8-bit ones
    idx = some_tokens(2, 20)
    full = model.logits(idx)[..., :60]
    want = int8.quantize(model).logits(idx)[..., :60]
    assert 0.005 < (want - full).norm() / full.norm() < 0.2
    cache = model.new_cache(2, 20, max_run=3)
    parts = [model.extend(part, cache, all_positions=True) for part in idx.split([9, 3, 1, 1, 3, 3], 1)]
    assert (torch.cat(parts, 1)[..., :60] - want).abs().max() < 1e-6


def test_the_loss_from_logits_is_the_models_own():
    model, idx = make('standard, documents'), some_tokens(3, 20)
    model.config.pad_rows_in_loss = False
    targets = some_tokens(3, 20, seed=1)
    targets[0, :5] = -1
    with torch.no_grad():
        assert abs(loss_from_logits(model, idx, targets)['nll'] - model(idx, targets)['nll']) < 1e-5


@pytest.mark.parametrize('variant, file', [('gpn', 'model_gpn'), ('context_ready, bptt', 'model_context_ready')])
def test_a_model_that_reads_its_weights_refuses(variant, file):
    with pytest.raises(UserError, match=f'{file} multiplies by its weights without calling its linear layers'):
        int8.quantize(make(variant))


@pytest.mark.parametrize('variant', ['gpn', 'context_ready, bptt'])
def test_its_equations_call_the_layers_and_so_take_int8(variant):
    model = make(variant).double()
    model.config.scan = 'loop'
    idx = some_tokens(2, 9)
    full = model.logits(idx)[..., :60]
    want = int8.quantize(model).logits(idx)[..., :60]
    assert (want - full).norm() > 0.001 * full.norm()
    assert (model.extend(idx, model.new_cache(2, 9), all_positions=True)[..., :60] - want).abs().max() < 1e-6


def read_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def trained(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp('int8') / 'run'
    assert train_tiny(tiny_data, out).returncode == 0
    return out


def test_sampling_tells_the_bytes_and_drafts_are_quantized_too(trained, monkeypatch):
    quantize, quantized = int8.quantize, []
    monkeypatch.setattr(int8, 'quantize', lambda model: quantized.append(model) or quantize(model))
    result = run('sample.py', trained, 'ab', '--weights=int8', f'--draft={trained}', '--draft_len=2',
                 '--max_new_tokens=9', '--temperature=0', '--dtype=float32', '--device=cpu')
    assert result.returncode == 0 and 'int8 weights: ' in result.stderr, result.stderr
    assert len(quantized) == 2 and 'acceptance by position: 1.00 1.00' in result.stderr  # the same model drafts
    assert_sentence(run('sample.py', trained, 'ab', '--weights=int4'), "weights is 'int4': expected int8")


def test_evaluation_shows_what_the_rounding_costs(trained):
    result = run('eval.py', trained, '--val', '--weights=int8', '--dtype=float32', '--device=cpu')
    assert result.returncode == 0, result.stderr
    values = read_records(trained / 'eval.jsonl')[-1]['results']['val']
    plain = run('eval.py', trained, '--val', '--dtype=float32', '--device=cpu').stdout
    told = 'compare them with each other, not with those of --val alone'
    assert told in result.stdout and told not in plain
    own = read_records(trained / 'eval.jsonl')[-1]['results']['val']['nats_per_token']
    assert abs(values['full_weights_nats'] - own) < 0.1  # the padding of the vocabulary has a share in training's loss
    assert values['int8_costs_nats'] == values['nats_per_token'] - values['full_weights_nats']
    assert 0 < abs(values['int8_costs_nats']) < 0.01
    assert values['mib_read_per_token'] < 0.3 * values['full_weights_mib_read_per_token']


@pytest.mark.skipif(attn_kernels.triton is None, reason='needs Triton')
@pytest.mark.parametrize('M, N, K, dtype, has_bias', [
    (1, 70, 200, torch.float32, True), (5, 32, 128, torch.float16, False), (33, 40, 72, torch.float32, False)])
def test_the_gpus_product_is_that_of_rounded_weights(M, N, K, dtype, has_bias, kernels_device):
    torch.manual_seed(0)
    x, bias = torch.randn(M, K, device=kernels_device).to(dtype), torch.randn(N, device=kernels_device)
    weight, scale = int8.int8_rows(torch.randn(N, K, device=kernels_device))
    got = int8._gpu_linear(weight, scale, bias if has_bias else None, x)
    want = x.double() @ (weight.double() * scale[:, None].double()).T + has_bias * bias.double()
    assert got.dtype == dtype
    assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3) * want.abs().max()


@pytest.mark.skipif(attn_kernels.triton is None, reason='needs Triton')
def test_a_wrong_product_of_the_gpu_is_not_used_and_a_line_says_so(monkeypatch, capsys):
    def right(x, weight, w_scale, bias):
        return int8._plain_linear(weight, w_scale, bias, x)

    def broken(*args):
        raise RuntimeError('no such instruction')
    for product, said in ((right, ''), (lambda *args: 1.1 * right(*args), 'differs from its definition by 10.0%'),
                          (broken, 'fails (RuntimeError) in float32')):
        monkeypatch.setattr(int8, '_gpu_product', product)
        int8.has_gpu_product.cache_clear()
        assert int8.has_gpu_product(torch.device('cpu')) == (said == '')
        err = capsys.readouterr().err
        assert said in err and bool(err) == bool(said)
    int8.has_gpu_product.cache_clear()
