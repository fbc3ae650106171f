"""Triton attention kernels: interpreted (or on a GPU) against float64, and compiled for an H100."""
import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import run_subprocess
from kernel_resources import STREAMS, VARIANTS
from references import assert_close, dense_attention, dense_mask, gradients, loss_and_gradients, some_tokens
from variants import make_model

import attn_kernels
import model_sps
import scans
from lm_architectures.run import models
from scans import attention as K

pytestmark = [pytest.mark.slow, pytest.mark.skipif(scans.triton is None, reason='needs Triton')]
ALL = 2**30
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make_case(streams, T, D, group, documents, reaches, dtype, device):
    """Return strided q, k, v, the dense mask, and further arguments of `triton_attention`."""
    NQ, NK, first = STREAMS[streams]
    torch.manual_seed(0)
    HK = 1 if group == 1 else 2
    q, k, v = torch.randn(2, 2 * T, 3, HK * group, D, device=device).to(dtype).unbind(2)
    q, k, v = q[:, :NQ * T], k[:, :NK * T, ::group], v[:, :NK * T, ::group]
    starts = torch.rand(2, T) < 0.02
    starts[0] = torch.arange(T) % 32 == 31  # documents start at the last row of a tile
    doc_start = torch.where(starts & documents, torch.arange(T), 0).cummax(1).values
    model = model_sps.Model(model_sps.Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_ids=8))
    model.w_x, model.w_rho = (*reaches, 0)[:2]
    seen = dense_mask(model.sees, T, doc_start, range(NK), range(first, first + NQ)).to(device)
    return (q, k, v), seen, (doc_start.to(device) if documents else None, reaches[:NK], T, first)


@pytest.mark.parametrize('streams', STREAMS)
@pytest.mark.parametrize('T, D, group, documents, reaches, dtype', [
    (1, 32, 1, False, (0, ALL), torch.float32), (33, 32, 2, False, (7, ALL), torch.float32),
    (33, 128, 1, True, (7, 1), torch.float32), (100, 32, 1, True, (ALL, 0), torch.float32),
    (130, 64, 1, False, (ALL, 62), torch.float32), (130, 64, 1, True, (64, ALL), torch.float16),
    pytest.param(1100, 128, 1, True, (64, ALL), torch.bfloat16, marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason='needs a GPU: the interpreter multiplies bf16 wrongly'))])
def test_kernels_equal_dense_attention(streams, T, D, group, documents, reaches, dtype, kernels_device):
    inputs, seen, options = make_case(streams, T, D, group, documents, reaches, dtype, kernels_device)
    want = gradients(lambda q, k, v: dense_attention(q, k, v, seen), *(x.double() for x in inputs))
    got = gradients(lambda *qkv: K.triton_attention(*qkv, *options), *inputs)
    assert_close(got, want, TOLERANCE[dtype])
    assert seen.sum(-1).max() == 1 or all(w.any() for w in want)  # a single key has a constant probability


def least_tiles(seen, own, walked):
    """Count the own x walked tiles that cover the visible pairs, and those that need a mask."""
    tiles = []
    for strip in seen.split(own):
        columns = strip.any(0).nonzero().flatten().tolist()
        tiles += [strip[:, n:n + walked] for n in range(columns[0], columns[-1] + 1, walked)] if columns else []
    return len(tiles), sum(tile.shape[1] < walked or not tile.all() for tile in tiles)


@pytest.mark.skipif(torch.cuda.is_available(), reason='counts calls, which only the interpreter makes one by one')
@pytest.mark.parametrize('streams, documents, reaches', [
    ('one', False, (ALL,)), ('both', True, (3, ALL)), ('x alone', False, (ALL, 0)), ('rho alone', True, (ALL, 64))])
def test_kernels_load_only_needed_tiles_and_mask_only_edges(streams, documents, reaches, kernels_device, monkeypatch):
    """Kernels call `_tile_start` once per loaded tile, `_sees` once per masked tile."""
    T, spies = 100, {name: mock.Mock(wraps=getattr(K, name)) for name in ('_tile_start', '_sees')}
    for name, spy in spies.items():
        monkeypatch.setattr(K, name, spy)
    inputs, seen, options = make_case(streams, T, 32, 1, documents, reaches, torch.float32, kernels_device)
    gradients(lambda *qkv: K.triton_attention(*qkv, *options), *inputs)

    loaded = masked = 0
    NQ, NK, _ = STREAMS[streams]
    for block in seen.unflatten(2, (NK, T)).unflatten(1, (NQ, T)).transpose(2, 3).flatten(0, 2):
        for result, (block_q, block_k, *_) in K.TILES[32, 32].items():
            own, walked, oriented = (block_k, block_q, block.T) if result == 'dk, dv' else (block_q, block_k, block)
            least = least_tiles(oriented, own, walked)
            loaded, masked = loaded + least[0], masked + least[1]
    assert (spies['_tile_start'].call_count, spies['_sees'].call_count) == (loaded, masked)


def test_the_operator_passes_opcheck(kernels_device):
    inputs, _, options = make_case('both', 33, 32, 1, True, (33, 7), torch.float32, kernels_device)
    args = [x.contiguous().requires_grad_() for x in inputs]
    torch.library.opcheck(K._forward_op, (*args, options[0], [33, 7, 0]),
                          test_utils=('test_schema', 'test_faketensor', 'test_autograd_registration'))


@pytest.mark.parametrize('name, values', [
    ('standard', dict(window=3, n_kv_head=1)), ('sps', dict(window=3)), ('sps', dict(window=3, predict_layers=1)),
    ('sps', dict(method='reverse_sps', window=0, eos_id=None))])
def test_models_give_the_same_losses_and_gradients_with_the_kernels(name, values, kernels_device):
    found, idx = [], some_tokens(2, 40).to(kernels_device)
    for attention in ('flex', 'triton'):
        model = make_model(name, dict(n_layer=2, n_embd=64, eos_id=59, attention=attention) | values, kernels_device)
        found.append(loss_and_gradients(model(idx, idx.roll(-1, 1))['loss'], model))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def small(file, head_size=64, **values):
    sizes = dict(n_layer=2, n_head=2, n_embd=2 * head_size, vocab_size=64, n_ids=60)
    return file.Model(file.Config(**sizes | values))


EDITS = [('sees', lambda self, q, k: (k.pos <= q.pos) & (k.pos % 2 == 0)), ('score_bias', lambda self, q, k, head: 0),
         ('sees', property(lambda self: [self.forward] * 2))]


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_kernels_reject_what_they_do_not_implement(name, monkeypatch):
    file, cpu = models.model_file(name), torch.device('cpu')
    monkeypatch.setattr(scans, 'KERNELS_ON_CPU', True)
    model = small(file, attention='triton')
    K.make_mask(model, 8, cpu)
    with pytest.raises(ValueError, match='head sizes .* not 48.*--attention=auto'):
        small(file, 48, attention='triton')
    for edit in EDITS:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match='has been edited.*--attention=auto'):
            patch.setattr(file.Model, *edit, raising=False)
            small(file, attention='triton')
    monkeypatch.setattr(scans, 'KERNELS_ON_CPU', False)
    with pytest.raises(ValueError, match='needs a GPU.*--attention=auto'):
        K.make_mask(model, 8, cpu)


@pytest.fixture
def choose(monkeypatch):
    """Return a function: what runs each of a model's stream pairs, T (Triton) or P (PyTorch)."""
    def run(model, documents=True, T=100, shared=232448, device='cuda'):
        file, gpu = sys.modules[type(model).__module__], SimpleNamespace(shared_memory_per_block_optin=shared)
        monkeypatch.setattr(file, 'make_mask', lambda *args: 'PyTorch')
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: gpu)
        doc_start = torch.zeros(1, T, dtype=torch.int64) if documents else None
        masks = [file.attention_mask(model, T, torch.device(device), doc_start, *pair)
                 for pair in (model.stream_pairs() if hasattr(model, 'stream_pairs') else [()])]
        return ''.join('P' if mask == 'PyTorch' else 'T' for mask in masks)
    return run


@pytest.mark.parametrize('name, values, options, want', [
    ('sps', {}, {}, 'TT'), ('sps', {}, dict(documents=False), 'TT'),
    ('sps', dict(predict_layers=1), {}, 'TT'), ('sps', dict(predict_layers=1), dict(documents=False), 'PT'),  # causal x
    ('standard', {}, {}, 'T'), ('standard', dict(head_size=32), {}, 'T'), ('standard', dict(head_size=96), {}, 'P'),
    ('standard', {}, dict(documents=False), 'P'), ('standard', dict(window=99), dict(documents=False), 'P'),
    ('standard', dict(window=98), dict(documents=False), 'T'), ('standard', {}, dict(device='cpu'), 'P'),
    ('sps', {}, dict(device='cpu'), 'PP'), ('sps', dict(attention='flex'), {}, 'PP'),
    ('standard', {}, dict(shared=101376), 'T'), ('standard', dict(head_size=128), {}, 'T'),
    ('standard', dict(head_size=128), dict(shared=101376), 'P')])
def test_auto_takes_the_kernels_for_documents_windows_and_streams(name, values, options, want, choose, capsys):
    model = small(models.model_file(name), **values)
    if want == 'P' and options == dict(documents=False):
        with torch.no_grad():
            assert attn_kernels.make_mask(model, 100, 'cpu').kind == 'causal'
    assert choose(model, **options) == want and capsys.readouterr().err == ''
    assert [choose(model.to(dtype), **options) for dtype in TOLERANCE] == [want] * 3
    assert set(choose(model.double(), **options)) == {'P'}


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_auto_takes_flex_attention_for_an_edit_and_says_so_once(name, choose, import_edited, monkeypatch, capsys):
    file = import_edited(name, lambda source: source)  # a copy under another name
    model = small(file)
    assert set(choose(model)) == {'T'} and capsys.readouterr().err == ''
    said = 'the attention of model_edited was edited, so FlexAttention runs it, without scans/attention.py\n'
    for edit in EDITS:
        scans.warn_once.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(file.Model, *edit, raising=False)
            assert [{*choose(model)} for _ in range(2)] == [{'P'}] * 2 and capsys.readouterr().err == said
    model.reach = model.w_rho = torch.tensor(3)  # the kernels read numbers
    assert set(choose(model)) == {'P'}
    monkeypatch.setitem(sys.modules, 'scans.attention', None)
    monkeypatch.delattr(scans, 'attention')
    assert set(choose(model)) == {'P'} and capsys.readouterr().err == ''
    with pytest.raises(ValueError, match='needs the folder scans/'):
        small(file, attention='triton')


@pytest.mark.parametrize('kernels, n_kernels, n_rows', [('attention', 3, 3 * len(VARIANTS)), ('delta', 2, 3)])
def test_kernels_compile_for_an_h100_and_spill_nothing(kernels, n_kernels, n_rows, choose):
    """They fit in shared memory, and attention in 16 bits uses warp-group products (wgmma)."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    result = run_subprocess('tests/scans/kernel_resources.py', kernels, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split(', ') for line in result.stdout.splitlines()]
    assert len({row[0] for row in rows}) == n_kernels and len(rows) == n_rows
    for row in rows:
        stack, shared, wgmma = map(int, row[-3:])
        assert stack == 0 and shared <= 232448, row
        assert kernels == 'delta' or 'float32' in row[1] or wgmma > 0, row
    for D in (32, 64, 128) if kernels == 'attention' else ():  # auto knows how much they share
        most = max(int(row[-2]) for row in rows if int(row[3]) == D)
        assert [choose(small(model_sps, D), shared=n) for n in (most, most - 1)] == ['TT', 'PP']
