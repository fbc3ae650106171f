"""The interface that every model file implements, and properties common to all models."""
import contextlib
import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from references import assert_close, decode, dense_mask, some_tokens
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from variants import VARIANTS, decode_in_pieces, make, paper_model, paper_settings, small_model  # noqa: F401

import attn_kernels
import model_standard
from lm_architectures.data.text.tokenizers import padded_vocab
from lm_architectures.machine import devices
from lm_architectures.run import models

of_all = pytest.mark.parametrize('variant', VARIANTS)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


def needs(variant, *methods):
    """Skip a test of methods that the model does not have: most are optional."""
    missing = [name for name in methods if not hasattr(models.model_file(VARIANTS[variant][0]).Model, name)]
    if missing:
        pytest.skip(f'{variant} has no {missing[0]}')


# ---- decoding ----

@of_all
@pytest.mark.parametrize('seed', range(3))
def test_cached_decoding_equals_full_forward(variant, seed, device):
    needs(variant, 'extend')
    decode_in_pieces(make(variant, device), some_tokens(3, 64, seed).to(device), (1, 4, 18)[seed], seed)


@of_all
def test_short_extends_have_static_shapes_and_no_host_sync(variant, monkeypatch):
    """Meta tensors have no values, so code that would sync with a GPU fails here."""
    needs(variant, 'extend')
    monkeypatch.setattr(torch, 'autocast', lambda *_, **__: contextlib.nullcontext())  # not available on meta
    name, values = VARIANTS[variant]
    with torch.device('meta'):
        model = small_model(name, values).eval()
        cache = model.new_cache(2, 90, max_call=4)
        for n in (1, 4):
            for lengths in (None, torch.ones(2, dtype=torch.int64)):
                assert model.extend(torch.zeros(2, n, dtype=torch.int64), cache, lengths).shape == (2, 64)
        cache.rollback(1)
        if getattr(model, 'longest_draft', 0):
            token, pick = torch.zeros(2, dtype=torch.int64), lambda x: (x.argmax(-1), x.softmax(-1))
            assert [x.shape for x in model.draft(token, cache, 1, pick)] == [(2, 1), (2, 1, 64)]


@pytest.mark.parametrize('variant', ['gpn, loop', 'gdn', 'gdn, documents'])
@torch.no_grad()
def test_a_traced_step_decodes_like_extend(variant):
    """As in a CUDA graph. Without attention, which on a CPU reads only the filled slots."""
    model, idx = make(variant), some_tokens(2, 9)
    want, cache = model.logits(idx), model.new_cache(2, 9, max_call=2)
    model.extend(idx[:, :1], cache)
    step = make_fx(lambda tokens: model.extend(tokens, cache))(idx[:, 1:2])
    for t in (2, 3, 4, 5, None, 5, 6, 7, 8):
        if t is None:
            cache.rollback(1)
        else:
            assert (step(idx[:, t:t + 1]) - want[:, t])[:, :60].abs().max() < 1e-4


def test_a_full_cache_gives_a_clear_error():
    model = make('sps')
    with pytest.raises(ValueError, match='a row of 4 tokens does not fit a cache of max_tokens = 3'):
        model.extend(torch.zeros(1, 4, dtype=torch.int64), model.new_cache(1, 3))


# ---- losses and gradients ----

@of_all
def test_loss_is_the_mean_nll_of_the_counted_targets(variant):
    model, idx = make(variant), some_tokens(2, 30)
    targets = torch.roll(idx, -1, 1)
    targets[1, 3:9] = -1
    if getattr(model.config, 'K', 1) > 1:
        model.config.K = model.drawn.n_unrolls = 31  # T + 1 unrolls equal streaming, as in `final_hidden`
    out = model(idx, targets)
    if model.config.eos_id is not None:
        targets = targets.masked_fill(idx == model.config.eos_id, -1)
    nll_of = lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    if hasattr(model, 'final_hidden'):  # the training softmax may include padding ids, so nll is slightly larger
        assert torch.allclose(out['nll'], nll_of(model._logits(model.final_hidden(idx))), atol=1e-5)
    assert -1e-5 < out['nll'] - nll_of(model.logits(idx)) < 1
    out['loss'].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert (model.logits(idx)[..., 60:] == float('-inf')).all()


@of_all
def test_a_window_without_targets_has_zero_loss(variant):
    model, idx = make(variant).train(), some_tokens(2, 12)
    out = model(idx, torch.full_like(idx, -1))
    out['loss'].backward()
    assert out['nll'] == 0 and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('variant', [name for name, (_, values) in VARIANTS.items() if values.get('eos_id')])
def test_documents_do_not_see_each_other(variant):
    model, idx = make(variant), some_tokens(1, 20)
    idx[0, 9] = 59
    other = idx.clone()
    other[0, :9] = 1
    assert (model.logits(idx)[0, 10:, :60] - model.logits(other)[0, 10:, :60]).abs().max() < 1e-5


@of_all
def test_bf16_weights_and_autocast_stay_close_to_fp32(variant, device):
    needs(variant, 'extend')
    model, idx = make(variant, device), some_tokens(2, 30).to(device)
    want, loss = model.logits(idx)[..., :60], model(idx, idx)['loss']
    with torch.autocast(device, torch.bfloat16):
        half = model(idx, idx)['loss']
        half.backward()
    assert abs(half - loss) < 0.05 and all(p.grad.isfinite().all() for p in model.parameters())
    half = copy.deepcopy(model).to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        cache = half.new_cache(2, 30, dtype=dtype)
        got = torch.cat([half.extend(idx[:, :20], cache, all_positions=True),
                         half.extend(idx[:, 20:], cache, all_positions=True)], 1)
        assert (got[..., :60].float() - want).abs().mean() < 0.05 * want.abs().mean()


def test_final_hidden_follows_from_the_trunk():
    model, idx = make('mtp, documents'), some_tokens(2, 12)
    hidden = model.norm(model.blocks[-1](model.trunk(idx), *model._prepare(idx)))
    assert torch.allclose(hidden, model.final_hidden(idx), atol=1e-5)


@pytest.mark.parametrize('variant', [variant for variant, (_, values) in VARIANTS.items() if not values.get('bptt')])
def test_checkpointed_blocks_run_twice_and_give_the_same_gradients(variant):
    (name, values), idx, found = VARIANTS[variant], some_tokens(2, 20), []
    config = models.model_file(name).Config
    setting = next((x for x in getattr(config, 'may_change', ()) if x.startswith('checkpoint_')), None)
    if setting is None:
        pytest.skip(f'{name} has no such setting')
    for is_on in (False, True):
        more = {setting: is_on} | (dict(dropout=0.3) if hasattr(config, 'dropout') else {})
        torch.manual_seed(0)
        model, calls = small_model(name, values | more).train(), []
        for block in model.modules():
            if type(block).__name__.endswith('Block'):
                next(block.children()).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(idx, idx)['loss'].backward()
        found.append((len(calls), [p.grad for p in model.parameters()]))
    (once, want), (twice, got) = found
    future = len(getattr(model, 'future', []))  # MTP's heads, which are always checkpointed
    assert twice == 2 * (once - future) > 0
    assert all(map(torch.equal, got, want))


@of_all
def test_editing_logits_changes_loss_evaluation_and_decoding(variant, monkeypatch):
    """The edit is a soft cap with a learned scale."""
    needs(variant, '_logits', 'final_hidden', 'extend')
    model, idx = make(variant), some_tokens(2, 30)
    model.scale = torch.nn.Parameter(torch.tensor(1.7))
    if getattr(model.config, 'K', 1) > 1:
        model.config.K = model.drawn.n_unrolls = 31  # streaming
    nll, logits, head = model(idx, idx.roll(-1, 1))['nll'], model.logits(idx)[..., :60], type(model)._logits
    monkeypatch.setattr(type(model), '_logits', lambda self, *args: self.scale * torch.tanh(head(self, *args)))
    out = model(idx, idx.roll(-1, 1))
    targets = idx.roll(-1, 1).masked_fill(idx == model.config.eos_id, -1) if model.config.eos_id else idx.roll(-1, 1)
    edited = model.scale * torch.tanh(head(model, model.final_hidden(idx)))
    want = F.cross_entropy(edited.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert abs(out['nll'] - want) < 1e-5 and abs(want - nll) > 1e-3
    out['loss'].backward()
    want_grad, = torch.autograd.grad(want, [model.scale])
    alone = torch.equal(out['loss'], out['nll'])  # no other part of the loss uses the head
    assert abs(model.scale.grad) > 1e-5 and (not alone or abs(model.scale.grad - want_grad) < 1e-5)
    new = model.logits(idx)[..., :60]
    assert (new - logits).abs().max() > 1e-2 and (decode(model, idx, [20, 10]) - new).abs().max() < 1e-4


# ---- compiling ----

@pytest.mark.slow
@pytest.mark.parametrize('variant', [
    'standard', 'sps', 'context_ready, documents, window', 'nextlat, documents, tied', 'bst', 'gpn, loop',
    'gdn, documents', 'context_ready, bptt', *(pytest.param(variant, marks=needs_gpu) for variant in (
        'standard, grouped queries', 'reverse_sps, top layer', 'mtp, documents',
        'jtp, documents', 'gpn, one layer, documents', 'gdn, documents, loop'))])
def test_compiled_cuda_training_equals_eager_and_is_compiled_once(variant, monkeypatch):
    """Without a GPU, uses a backend that generates no code."""
    from torch._dynamo.utils import counters
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu':
        monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    torch.compiler.reset()  # forget compiled code of other tests
    counters.clear()
    model = make(variant, device).train()
    compiled, graphs = devices.Machine(0, 1, torch.device(device)).compiled(copy.deepcopy(model), True), []
    for seed in range(3):
        idx = some_tokens(2, 64 if device == 'cuda' else 12, seed).to(device)
        results = []
        for called in (model, compiled):
            torch.manual_seed(0)  # BST draws pairs
            called.zero_grad()
            called(idx, idx)['loss'].backward()
            results.append([p.grad.clone() for p in called.parameters()])
        assert_close(*results[::-1], 1e-4)
        graphs.append(counters['stats']['unique_graphs'])
    assert graphs[1] == graphs[2]


class InFp32(torch.nn.Linear):
    def forward(self, x):
        with torch.autocast('cpu', enabled=False):
            return super().forward(x)


@pytest.mark.slow
def test_a_compiled_backward_has_the_dtypes_of_eager(monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    torch.compiler.reset()
    layer, x, grads = InFp32(32, 32), torch.randn(64, 32), []
    for called in (layer, devices.Machine(0, 1, x.device).compiled(layer, True)):
        with torch.autocast('cpu', torch.bfloat16):
            y = called(x)
        grads.append(torch.autograd.grad(y, [layer.weight], x))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


# ---- sizes, costs and settings ----

@pytest.mark.parametrize('name, values', [
    *(case for case in VARIANTS.values() if not case[1].get('bptt')),
    ('standard', dict(window=0)), ('standard', dict(window=100)), ('sps', dict(method='reverse_sps', window=50)),
    ('sps', dict(method='delayed_state', window=4, persistent_window=6)), ('nextlat', dict(objective='ntp')),
    ('nextlat', dict(token_loss='ce', stop_head=False, horizon=3, n_dynamics=5)), ('nextlat', dict(lambda_kl=0)),
    ('mtp', dict(horizon=3, tied_head=True)), ('jtp', dict(horizon=3, tied_head=True)),
    ('bst', dict(n_embd=64, n_text=16, vocab_size=2048, pair_share=0.5)),
    ('bst', dict(n_embd=64, n_text=512, pair_share=0.01))], ids=str)
def test_flops_per_token_equal_the_flop_counter(name, values, monkeypatch):
    """With attention to all pairs, which a CPU computes in one tile, and the loss in one chunk."""
    file, T, model = models.model_file(name), 48, small_model(name, values | dict(eos_id=None)).train()
    if not hasattr(file, 'mean_keys'):
        pytest.skip('not an attention model: other tests count its FLOPs')

    def all_pairs(sees, _, keys=(0,), queries=None):
        pairs = dense_mask(sees, 12, None, keys, queries or keys).sum()
        assert mean_keys(sees, 12, keys, queries) == pairs / 12
        return T * len(keys) * len(queries or keys)
    mean_keys = attn_kernels.mean_keys
    monkeypatch.setattr(file, 'mean_keys', all_pairs)
    monkeypatch.setattr(file, 'chunked_loss', lambda fn, rows, params, width, shared=(): fn(*rows, *shared))
    for module in model.modules():
        module.checkpoints = False  # MTP's heads would be recomputed
    tokens, c = torch.zeros(2, T, dtype=torch.int64), model.config
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)['loss'].backward()
    want = counter.get_total_flops() / (2 * T)
    if hasattr(model, 'stream_pair'):  # the last layer's queries of the other stream are not used
        want -= 6 * c.n_embd * c.n_head * c.head_size
    if hasattr(model, 'dynamics'):  # the first position has no predictions
        want += 6 * model.horizon / T * attn_kernels.n_matrix_weights(model.dynamics)
    assert model.flops_per_token(T) == pytest.approx(want, rel=0.02 if hasattr(model, 'previous_head') else 1e-6)


@pytest.mark.parametrize('T, window', [(5000, None), (5000, 300), (20_000, 700)])
def test_sampled_queries_give_the_mean_number_of_keys(T, window):
    n = T if window is None else window + 1
    keys = attn_kernels.mean_keys(small_model('standard', dict(window=window)).sees, T)
    assert keys == pytest.approx(n - n * (n - 1) / 2 / T, rel=1e-3)


@pytest.mark.parametrize('path, millions', [
    ('standard_xs', 53), ('standard_s', 131), ('standard_m', 379), ('standard_l', 831), ('standard_xl', 1678),
    ('nextlat/fineweb_ntp', 1320), ('nextlat/fineweb_nextlat_d1', 1400), ('nextlat/fineweb_nextlat_d2', 1400),
    ('nextlat/fineweb_mtp_d1', 1370), ('nextlat/fineweb_mtp_d2', 1420), ('nextlat/fineweb_mtp_d8', 1720),
    ('nextlat/fineweb_jtp_d1', 1340), ('nextlat/fineweb_jtp_d8', 1340), ('nextlat/fineweb_bst', 2570),
    ('gpn/gpn_130m', 129.2), ('gpn/gpn_2l', 132.8), ('gpn/gpn_nomem', 130.5), ('gpn/gpn_50m_bias', 50.2),
    ('gpn/gpn_50m_memory_bias', 49.8), ('gpn/gdn_130m', 130.5),
    ('owt_d1_c2048', 215), ('owt_d5_c1120', 157), ('owt_n6_c1088', 155), ('owt_n12_c768', 134)])
def test_parameter_counts_match_the_papers(path, millions):
    digits = 1 if isinstance(millions, float) else -1 if millions % 10 == 0 and path.startswith('nextlat') else 0
    found = sum(p.numel() for p in paper_model(path).parameters()) / 1e6
    assert round(found, digits) == millions


def test_nextlat_task_models_have_the_papers_parameter_counts():
    """The paper counts the blocks and p_psi for A5, but the whole GPT for Manhattan."""
    a5, manhattan = (paper_model(f'nextlat/{name}', n_ids=n_ids, vocab_size=padded_vocab(n_ids))
                     for name, n_ids in (('a5', 61), ('manhattan', 4588)))
    count = models.count_parameters
    assert count(a5.dynamics) == pytest.approx(2.62e6, rel=5e-3)
    assert count(a5.blocks) + count(a5.norm) == pytest.approx(6.43e6, rel=5e-3)
    assert count(manhattan) - count(manhattan.dynamics) == pytest.approx(88.5e6, rel=5e-3)


@pytest.mark.parametrize('name, values, sentence', [
    ('sps', dict(method='two_x_memory', window=64), 'window = 64: two_x_memory has no windowed stream, so set window'),
    ('sps', dict(predict_layers=13), 'predict_layers = 13: expected 1 to n_layer = 12, or None'),
    ('sps', dict(n_ids=50304), 'vocab_size = 50304 has no room for 50304 token ids and <predict>'),
    ('standard', dict(rope_scaling=(8, 1, 4)), 'rope_scaling = (8, 1, 4): expected factor, low, high, tokens'),
    ('standard', dict(rope_scaling=(8, 4, 1, 8)), 'expected factor, low, high, tokens'),
    ('standard', dict(window=-1), 'window = -1: expected at least 0'), ('gpn', dict(d_k=0), 'd_k = 0'),
    ('bst', dict(pair_share=0), 'pair_share = 0: expected more than 0, and at most 1'),
    ('nextlat', dict(horizon=0), 'horizon = 0: expected at least 1'), ('standard', dict(n_head=0), 'n_head = 0'),
    ('context_ready', dict(K=1, bptt=True), 'needs a correction'),
    ('context_ready', dict(variant='extra_ffn'), 'nothing to unroll'),
    ('context_ready', dict(qk_norm=True), "settings of block = 'llama'"), ('context_ready', dict(dropout=2), 'dropout'),
    ('context_ready', dict(n_embd=18, n_head=2), 'even whole number')])
def test_conflicting_settings_give_a_clear_error(name, values, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        models.model_file(name).Config(**values)


@pytest.mark.parametrize('tied_head', [True, False])
def test_init_torch_keeps_the_default_init_of_linear_layers(tied_head):
    torch.manual_seed(0)
    values = dict(n_layer=1, n_head=2, n_embd=128, vocab_size=512, n_ids=512, eos_id=None, qkv_bias=True)
    model = model_standard.Model(model_standard.Config(init='torch', tied_head=tied_head, **values))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not (name == 'head' and tied_head):
            bound = module.in_features ** -0.5  # nn.Linear's default is uniform in (-bound, bound)
            for p in module.parameters():
                assert 0.95 * bound < p.abs().max() <= bound and abs(p.std() * 3 ** 0.5 / bound - 1) < 0.05
    embed = model.embed.weight
    assert abs(embed.std() / 0.02 - 1) < 0.02 and embed.abs().max() > 0.07  # a normal distribution
    assert (model.head.weight is embed) == tied_head
