"""Gated DeltaNet: the loop, the fast scan and the whole model against the paper."""
import contextlib
import importlib.metadata
import importlib.util
import runpy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import saved_bytes
from references import document_numbers, random_model, some_tokens
from test_models import paper_model

import model_gdn as G
from scans import gdn

SMALL = dict(n_layer=2, n_head=2, n_embd=24, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, chunk_len=5)
FORMS = ['loop', 'fast']


def make(**values):
    return random_model(G, 1, 0.25, **SMALL | values)[0]


# ---- the recurrence ----

def naive_recurrence(q, k, v, log_decay, beta, is_doc_start):
    """Return o_t = S_t q_t (B, T, H, D) and the last S^T (B, H, K, D) for each row and head.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.
    """
    B, T, H, K = k.shape
    S, reads = torch.zeros(B, H, v.shape[-1], K, dtype=k.dtype), []
    for t in range(T):
        if is_doc_start is not None:
            S = S * ~is_doc_start[:, t, None, None, None]
        alpha, b = log_decay[:, t, :, None, None].exp(), beta[:, t, :, None, None]
        key, value = k[:, t, :, None], v[:, t, ..., None]  # row and column vectors
        S = S @ (alpha * (torch.eye(K, dtype=k.dtype) - b * key.mT @ key)) + b * value @ key
        reads.append((S @ q[:, t, ..., None]).squeeze(-1))
    return torch.stack(reads, 1), S.mT


def some_inputs(T, dtype=torch.float64, decay=1.0, K=6, D=5):
    torch.manual_seed(T)
    q, k = (F.normalize(torch.randn(2, T, 2, K, dtype=dtype), dim=-1) for _ in range(2))
    v, log_decay = torch.randn(2, T, 2, D, dtype=dtype), -decay * torch.rand(2, T, 2, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, log_decay, torch.rand(2, T, 2, dtype=dtype))]


def scan(form, memory, *tokens, is_doc_start=None, active=None, chunk_len=64):
    """Run `Block.loop` or scans/gdn.py."""
    if form == 'fast':
        return gdn.scan_chunks(memory, tokens, is_doc_start, active, chunk_len)
    config = G.Config(n_layer=1, n_head=2, d_k=memory.shape[2], d_v=memory.shape[3], chunk_len=chunk_len)
    return G.Block(config, 0).loop(memory, tokens, is_doc_start, active)


def with_gradients(outputs, inputs):
    torch.manual_seed(1)
    weighted = sum((x * torch.randn(x.shape, dtype=torch.float64).to(x)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(weighted, inputs)]


@pytest.mark.parametrize('T, chunk_len', [(1, 64), (13, 4), (13, 7), (70, 64)])
@pytest.mark.parametrize('documents', [False, True])
@pytest.mark.parametrize('form', FORMS)
def test_values_and_gradients_equal_the_papers_recurrence(form, T, chunk_len, documents):
    """Also for lengths that chunks do not divide, and documents that start within a chunk."""
    inputs, is_doc_start = some_inputs(T), torch.rand(2, T) < 0.25 if documents else None
    want = with_gradients(naive_recurrence(*inputs, is_doc_start), inputs)
    memory = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    got = with_gradients(scan(form, memory, *inputs, is_doc_start=is_doc_start, chunk_len=chunk_len), inputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('version, is_good', [('3.3.1', True), ('3.4.0', False), ('3.6.0', False), ('3.7.1', True)])
def test_scan_fla_names_the_versions_of_triton_with_wrong_gradients(version, is_good, monkeypatch):
    for module, name, value in ((importlib.util, 'find_spec', True), (importlib.metadata, 'version', version),
                                (torch.cuda, 'is_available', True), (torch.cuda, 'get_device_capability', (9, 0))):
        monkeypatch.setattr(module, name, lambda *args, value=value: value)
    with contextlib.nullcontext() if is_good else pytest.raises(ValueError, match=f"3.4 to below 3.7.1.* is {version}"):
        gdn.import_fla()


@pytest.mark.skipif(None in map(importlib.util.find_spec, ('fla', 'einops')), reason='needs fla-core and einops')
@pytest.mark.parametrize('form', FORMS)
def test_values_and_gradients_equal_flash_linear_attention(form):
    """Errors are relative to the largest value. Their slow reference computes in fp32."""
    package, = importlib.util.find_spec('fla').submodule_search_locations  # the other files need a GPU
    theirs = runpy.run_path(f'{package}/ops/gated_delta_rule/naive.py')['naive_recurrent_gated_delta_rule']
    inputs = some_inputs(37, torch.float32, K=16, D=8)
    q, k, v, log_decay, beta = inputs
    want = with_gradients(theirs(q, k, v, beta, log_decay, scale=1, output_final_state=True), inputs)
    for x, y in zip(with_gradients(scan(form, torch.zeros(2, 2, 16, 8), *inputs), inputs), want):
        assert (x - y).abs().max() <= 1e-6 * y.abs().max()


@pytest.mark.parametrize('documents', [False, True])
def test_scan_fla_passes_documents_to_the_kernel_as_sequences(documents, monkeypatch):
    def kernel(q, k, v, g, beta, scale, cu_seqlens=None):
        is_doc_start = None
        if cu_seqlens is not None:
            assert len(q) == 1 and (cu_seqlens.diff() > 0).all() and cu_seqlens[-1] == q.shape[1]
            is_doc_start = torch.zeros(1, q.shape[1], dtype=torch.bool).index_fill(1, cu_seqlens[:-1], True)
        return naive_recurrence(scale * q.double(), k.double(), v.double(), g.double(), beta.double(), is_doc_start)

    for name in ('fla', 'fla.ops', 'fla.ops.gated_delta_rule'):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(chunk_gated_delta_rule=kernel))
    inputs = [x.detach().bfloat16().double().requires_grad_() for x in some_inputs(13)]  # the kernel multiplies in bf16
    is_doc_start = torch.rand(2, 13) < 0.25 if documents else None
    memory = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    (want, _), (got, _) = (run(memory, inputs, is_doc_start, None, 64) for run in (gdn.scan_chunks, gdn.scan_fla))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert all(x.abs().sum() > 0 for x in torch.autograd.grad(got.square().sum(), inputs))


@pytest.mark.parametrize('extreme', ['decay', 'equal keys'])
def test_chunks_of_64_in_fp32_are_close_to_float64(extreme):
    """Decays that underflow in fp32, and equal keys, which make a power-series inverse fail."""
    wide = some_inputs(130, decay=60.0 if extreme == 'decay' else 0.0)
    if extreme == 'equal keys':
        wide[1] = wide[1][:, :1].expand(-1, 130, -1, -1).detach().clone().requires_grad_()
    narrow = [x.detach().float().requires_grad_() for x in wide]
    want, got = (with_gradients(scan('fast', torch.zeros(2, 2, 6, 5, dtype=x[0].dtype), *x), x) for x in (wide, narrow))
    for x, y in zip(got, want):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-4)


def test_the_loop_saves_its_state_once_per_segment():
    inputs = some_inputs(32)
    kept = saved_bytes(lambda: scan('loop', torch.zeros(2, 2, 6, 5, dtype=torch.float64), *inputs, chunk_len=8))
    assert kept <= 4 * 8 * 2 * 2 * 6 * 5 + sum(x.nbytes for x in inputs)


# ---- the model ----

def paper_hidden(model, idx):
    """Compute final_hidden for windows (B, T) from the paper's equations, written out."""
    w, c = dict(model.named_parameters()), model.config
    H, K, D, W = c.n_head, c.d_k, c.d_v, c.conv_size
    document = document_numbers(idx, c.eos_id)
    is_doc_start = F.pad(document.diff() > 0, (1, 0))

    def rms(x, name):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[name + '.weight']

    def unit(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    h = w['embed.weight'][idx]
    for i in range(c.n_layer):
        linear = lambda x, name: x @ w[f'blocks.{i}.{name}.weight'].T
        x = rms(h, f'blocks.{i}.memory_norm')
        projected, mixed = linear(x, 'qkv'), 0
        for j in range(W):  # j tokens before
            earlier, then = F.pad(projected, (0, 0, j, 0)), F.pad(document, (j, 0), value=-1)
            is_same = (then[:, :idx.shape[1]] == document).unsqueeze(-1)
            mixed = mixed + is_same * w[f'blocks.{i}.conv'][:, W - 1 - j] * earlier[:, :idx.shape[1]]
        q, k, v = (y.unflatten(-1, (H, -1)) for y in F.silu(mixed).split([H * K, H * K, H * D], -1))
        rate, bias = w[f'blocks.{i}.log_rate'].exp(), w[f'blocks.{i}.dt_bias']
        read, _ = naive_recurrence(unit(q) / K ** 0.5, unit(k), v, -rate * F.softplus(linear(x, 'decay') + bias),
                                    linear(x, 'beta').sigmoid(), is_doc_start)
        gated = rms(read, f'blocks.{i}.out_norm').flatten(2) * F.silu(linear(x, 'read_gate'))
        h = h + linear(gated, 'read_out')
        gate, up = linear(rms(h, f'blocks.{i}.ffn_norm'), 'gate_up').chunk(2, -1)
        h = h + linear(F.silu(gate) * up, 'ffn_out')
    return rms(h, 'norm')


@pytest.mark.parametrize('eos_id', [None, 59])
@pytest.mark.parametrize('form', FORMS)
def test_the_model_equals_the_papers_equations(form, eos_id):
    model, idx = make(eos_id=eos_id, scan=form), some_tokens(2, 23)
    with torch.no_grad():
        want, got = paper_hidden(model, idx), model.final_hidden(idx)
    assert (got - want).norm() < 1e-10 * want.norm()


# ---- sizes ----

def test_the_papers_state_has_1_97_million_numbers_in_fp32():
    model = paper_model('gpn/gdn_130m').to(torch.bfloat16)
    cache = model.new_cache(1, 2048, device='meta')
    assert cache.memory.numel() == 1_966_080 and cache.memory.dtype == torch.float32 and model.config.n_ffn == 1472
    assert model.head.weight is not model.embed.weight


def test_flops_per_token_equal_a_hand_count():
    model = make(n_layer=3)
    H, K, D, C = 2, 8, 12, 24
    layer = C * H * (2 * K + D) + 2 * C * H + 2 * C * H * D + 3 * C * 40  # qkv, beta and decay, gate and out, SwiGLU
    memory = H * 2 * (K * D + K * D + K * D)  # read with the key, write, read with the query
    for T in (1, 100):
        assert model.flops_per_token(T) == 3 * (3 * (2 * layer + memory) + 2 * C * 64)


def test_initial_weights_match_the_official_code():
    torch.manual_seed(0)
    model = G.Model(G.Config(n_layer=2, n_embd=128, n_head=64, d_k=8, d_v=16, vocab_size=512, n_ids=512))
    for name, p in model.named_parameters():
        if name.endswith('log_rate'):
            assert 0 < p.exp().min() < 2 and 14 < p.exp().max() < 16
        elif name.endswith('dt_bias'):
            assert 9e-4 < F.softplus(p).min() < 3e-3 and 0.05 < F.softplus(p).max() < 0.11
        elif p.dim() == 1:
            assert (p == 1).all()
        elif name == 'head.weight':  # nn.Linear's default is uniform
            assert 0.99 * 128 ** -0.5 < p.abs().max() <= 128 ** -0.5 and abs(p.std() * (3 * 128) ** 0.5 - 1) < 0.05
        else:
            assert abs(p.std() / 0.02 - 1) < 0.05
