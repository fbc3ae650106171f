"""What multiplies fp32 matrices on a CPU: oneDNN gives what BLAS gives, in nn.Linear, its gradients and train.py."""
import json

import pytest
import torch
from conftest import TINY

import attn_kernels
import train
from common import cpu_forms, matmul
from common.files import UserError
from common.matmul import use_matmul
from common.runs import read_run

has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.library, 'get_kernel')
needs_onednn = pytest.mark.skipif(not has_onednn, reason='this PyTorch has no oneDNN, or no way to give it products')


def layouts(m, n):
    """{how it lies in memory: a matrix (m, n)}."""
    return {
        'rows': torch.randn(m, n), 'columns': torch.randn(n, m).t(), 'row, repeated': torch.randn(1, n).expand(m, n),
        'column, repeated': torch.randn(m, 1).expand(m, n), 'one number': torch.randn(1, 1).expand(m, n),
        'part of rows': torch.randn(m, n + 3)[:, 1:n + 1], 'part of columns': torch.randn(n, m + 5)[:, 2:m + 2].t(),
        'every second row': torch.randn(2 * m, n)[::2], 'every second column': torch.randn(m, 2 * n)[:, ::2],
        'rows that overlap': torch.randn(m + n).unfold(0, n, 1)[:m]}


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for products of any size; a list of the shapes that it was given."""
    given = []
    monkeypatch.setattr(matmul, 'SMALLEST', 1)
    use_matmul('onednn', 'cpu', torch.float32)
    linear = torch.ops.mkldnn._linear_pointwise

    def counted(a, b, *rest):
        given.append((*a.shape, b.shape[0]))
        return linear(a, b, *rest)
    monkeypatch.setattr(matmul.torch.ops.mkldnn, '_linear_pointwise', counted)
    return given


@needs_onednn
@pytest.mark.parametrize('k', [1, 48, 130])
def test_products_of_every_layout_are_those_of_float64(onednn, k):
    torch.manual_seed(0)
    for name_a, a in layouts(20, k).items():
        for name_b, b in layouts(k, 33).items():
            want = a.double() @ b.double()
            error = (torch.mm(a, b) - want).abs().max() / want.abs().max()
            assert error < 1e-5, (name_a, name_b, error)
    assert onednn


@needs_onednn
def test_a_linear_layer_and_its_gradients(onednn):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(48, 96), torch.randn(4, 8, 48, requires_grad=True)
    layer(x).square().sum().backward()
    got = layer(x), x.grad, layer.weight.grad, layer.bias.grad
    assert len(onednn) == 4  # forward twice, two gradients
    layer64, x64 = torch.nn.Linear(48, 96).double(), x.detach().double().requires_grad_()
    layer64.load_state_dict(layer.state_dict())
    layer64(x64).square().sum().backward()
    for mine, exact in zip(got, (layer64(x64), x64.grad, layer64.weight.grad, layer64.bias.grad)):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_what_onednn_is_not_given(onednn, monkeypatch):
    a = torch.ones(8, 8)
    for b in (a.double(), a.bfloat16(), a.long()):
        assert (b @ b == 8).all()
    assert torch.addmm(a, a, a, beta=2, alpha=3)[0, 0] == 2 + 3 * 8
    assert torch.mm(torch.ones(0, 8), a).shape == (0, 8)
    assert (torch.mm(torch.ones(3, 0), torch.ones(0, 2)) == 0).all()
    n_given = len(onednn)
    monkeypatch.setattr(matmul, 'SMALLEST', 8 ** 3 + 1)
    assert (a @ a == 8).all() and len(onednn) == n_given
    monkeypatch.setattr(matmul, 'SMALLEST', 1)
    use_matmul('blas', 'cpu', torch.float32)
    assert (a @ a == 8).all() and len(onednn) == n_given


@needs_onednn
@pytest.mark.parametrize('faster', [True, False])
def test_auto_is_the_faster_one_and_the_first_process_says_which(monkeypatch, faster):
    monkeypatch.setattr(matmul, 'is_faster', lambda f, g, x, **_: faster)
    assert use_matmul('auto', 'cpu', torch.float32) == ('onednn' if faster else 'blas')
    monkeypatch.setattr(matmul, 'first_of_all', lambda mine: 'blas')
    assert use_matmul('auto', 'cpu', torch.float32) == 'blas'


def test_settings_that_cannot_be(monkeypatch):
    assert use_matmul('auto', 'cuda', torch.float32) == use_matmul('auto', 'cpu', torch.bfloat16) == 'auto'
    with pytest.raises(UserError, match="matmul is 'mkl': expected 'auto', 'blas' or 'onednn'"):
        use_matmul('mkl', 'cpu', torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    assert use_matmul('auto', 'cpu', torch.float32) == 'blas'
    with pytest.raises(UserError, match='matmul is onednn, which this PyTorch does not have: use --matmul=auto'):
        use_matmul('onednn', 'cpu', torch.float32)


@needs_onednn
def test_a_run_records_it_and_goes_on_with_it(onednn, tiny_data, tmp_path, capsys):
    out = tmp_path / 'run'
    args = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', '--dtype=float32', '--batch_size=4', '--max_tokens=640']
    train.main([*args, '--matmul=onednn'])
    assert 'products in float32 by oneDNN' in capsys.readouterr().out
    assert json.loads((out / 'config.json').read_text())['settings']['matmul'] == 'onednn'
    before, onednn[:] = len(onednn), []
    train.main([f'--out_dir={out}', '--eval_only'])
    assert before and onednn


def test_a_run_records_its_attention_and_goes_on_with_it(tiny_data, tmp_path, monkeypatch):
    out = tmp_path / 'run'
    args = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', '--dtype=bfloat16', '--batch_size=4', '--max_tokens=640']
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda f, g, x, **_: True)
    train.main(args)
    assert json.loads((out / 'config.json').read_text())['settings']['attention'] == 'fused'
    attn_kernels.tiles_in_bf16 = True
    monkeypatch.setattr(cpu_forms, 'is_faster', None)
    train.main([f'--out_dir={out}', '--eval_only'])
    assert not attn_kernels.tiles_in_bf16


def test_runs_of_older_code_go_on_as_they_were(tiny_data, tmp_path):
    out = tmp_path / 'run'
    train.main([*TINY, f'--data={tiny_data}', f'--out_dir={out}', '--batch_size=4', '--max_tokens=640'])
    record = json.loads((out / 'config.json').read_text())
    for name in 'crc32', 'matmul', 'attention':
        (record if name == 'crc32' else record['settings']).pop(name)
    (out / 'config.json').write_text(json.dumps(record))
    settings = read_run(out)['settings']
    assert (settings['matmul'], settings['attention']) == ('blas', 'tiles')
