"""The interface that every model file implements, and properties common to all models."""
import contextlib
import copy
import dataclasses
import functools
import random
import re

import pytest
import torch
import torch.nn.functional as F
from references import decode, some_tokens
from torch.fx.experimental.proxy_tensor import make_fx

import attn_kernels
import model_standard
import train
from lm_architectures.data.text.tokenizers import padded_vocab
from lm_architectures.machine import devices
from lm_architectures.run import models, run_settings
from papers.context_ready.reproduce import ROWS, training

SMALL = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=64, n_ids=60)
GROUPED = dict(n_head=6, n_kv_head=2, head_size=10, qkv_bias=True, qk_norm=True, rope_scaling=(8, 1, 4, 8))
GPN = dict(d_emb=24, d_k=8, d_v=12, n_ffn=40, segment_len=7)
GDN = dict(d_k=8, d_v=12, n_ffn=40, chunk_len=7)
VARIANTS = {
    'standard': ('standard', dict(eos_id=None)),
    'standard, documents': ('standard', dict(eos_id=59)),
    'standard, window': ('standard', dict(eos_id=59, window=3)),
    'standard, grouped queries': ('standard', GROUPED | dict(eos_id=59, window=5)),
    'sps': ('sps', dict(eos_id=59, window=3)),
    'sps, grouped queries': ('sps', GROUPED | dict(eos_id=59, window=3)),
    'sps, window 0': ('sps', dict(eos_id=59, window=0)),
    'sps, window 1, no documents, untied': ('sps', dict(eos_id=None, window=1, tied_head=False)),
    'sps, beyond the paper': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='token')),
    'sps, fork': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='state')),
    'sps, persistent window': ('sps', dict(eos_id=59, window=2, persistent_window=5)),
    'two_x_memory': ('sps', dict(eos_id=59, method='two_x_memory', window=None)),
    'delayed_state': ('sps', dict(eos_id=59, method='delayed_state', window=3)),
    'reverse_sps': ('sps', dict(eos_id=59, method='reverse_sps', window=3)),
    'reverse_sps, top layer': ('sps', dict(eos_id=None, method='reverse_sps', window=2, predict_layers=1)),
    'context_ready': ('context_ready', dict()),
    'context_ready, documents, window': ('context_ready', dict(eos_id=59, window=5)),
    'context_ready, concat': ('context_ready', dict(eos_id=59, variant='concat', window=0)),
    'context_ready, block head': ('context_ready', dict(eos_id=59, variant='block_head')),
    'context_ready, bptt': ('context_ready', dict(eos_id=59, bptt=True, window=5)),
    'context_ready, llama': ('context_ready', GROUPED | dict(block='llama', eos_id=59, window=5, tied_head=True)),
    'context_ready, llama, bptt': ('context_ready', GROUPED | dict(block='llama', bptt=True, variant='concat')),
    'roformer': ('context_ready', dict(K=1, eos_id=59)),
    'roformer, extra FFN, window': ('context_ready', dict(K=1, variant='extra_ffn', window=4)),
    'nextlat': ('nextlat', dict(eos_id=None)),
    'nextlat, documents, tied': ('nextlat', dict(eos_id=59, horizon=2, tied_head=True)),
    'mtp, documents': ('mtp', dict(eos_id=59, horizon=2)),
    'jtp, documents': ('jtp', dict(eos_id=59, horizon=2)),
    'nextlat, grouped queries': ('nextlat', GROUPED | dict(eos_id=59)),
    'bst': ('bst', dict(eos_id=None)),
    'bst, documents, half of the pairs': ('bst', dict(eos_id=59, pair_share=0.5, min_k=2)),
    'gpn': ('gpn', GPN | dict(eos_id=None)),
    'gpn, loop': ('gpn', GPN | dict(eos_id=None, n_layer=1, scan='loop')),
    'gpn, one layer, documents': ('gpn', GPN | dict(eos_id=59, n_layer=1)),
    'gpn, no memory, documents, decoder bias': ('gpn', GPN | dict(eos_id=59, n_head=0, decoder_bias=True)),
    'gdn': ('gdn', GDN | dict(eos_id=None)),
    'gdn, documents': ('gdn', GDN | dict(eos_id=59)),
    'gdn, documents, loop': ('gdn', GDN | dict(eos_id=59, n_layer=1, conv_size=2, scan='loop')),
}
ONE_OF_EACH = ['standard, documents', 'sps', 'sps, window 0', 'two_x_memory', 'delayed_state', 'reverse_sps',
               'nextlat, documents, tied', 'mtp, documents', 'jtp, documents', 'bst', 'gdn, documents']
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
ALL_FILES = [*ONE_OF_EACH, 'context_ready, documents, window', 'roformer', 'gpn, one layer, documents']
WITH_DOCUMENTS = [variant for variant, (_, values) in VARIANTS.items() if values.get('eos_id') is not None]


def make(variant, device='cpu'):
    return make_model(*VARIANTS[variant], device)


def make_model(name, values, device='cpu'):
    """Build a small model whose weights are large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = small_model(name, values).to(device).eval()
    for weight, p in model.named_parameters():
        if p.dim() >= 2:  # smaller for recurrences, which must not be chaotic
            recurrent = weight.startswith('correction.') or values.get('variant') == 'tied'
            torch.nn.init.normal_(p, std=0.05 if recurrent else 0.1 if name == 'gpn' else 0.15)
    return model


def small_model(name, values):
    """Build a small model of a file, with those settings in SMALL that its Config has."""
    module = models.model_file(name)
    own = {field.name for field in dataclasses.fields(module.Config)}
    return module.Model(module.Config(**{key: value for key, value in SMALL.items() if key in own} | values))


def paper_settings(name):
    """Return the settings of a config file, or of a row of papers/context_ready/rows.csv.

    Without those of a run that the row continues, which must have been trained.
    """
    argv = training(name).split()[2:] if name in ROWS else [f'config/{name}.py']
    new = [arg for arg in argv if not arg.startswith(('--init_from=', '--extend='))]
    s, values, _ = run_settings.read_settings(train.Settings, new)
    return vars(s) | values


def paper_model(name, **of_data):
    """Build the model of `paper_settings` on the meta device."""
    values = paper_settings(name) | of_data
    module = models.model_file(values.get('model', 'standard'))
    names = module.Config.__dataclass_fields__
    with torch.device('meta'):
        return module.Model(module.Config(**{name: x for name, x in values.items() if name in names}))


def needs_extend(variant):
    """Skip tests of cached decoding for models without it (it is optional)."""
    if not hasattr(models.model_file(VARIANTS[variant][0]).Model, 'extend'):
        pytest.skip(f'{variant} has no extend')


# ---- decoding ----

@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('seed', range(3))
def test_cached_decoding_equals_full_forward(variant, seed, device):
    needs_extend(variant)
    decode_in_pieces(make(variant, device), some_tokens(3, 64, seed).to(device), (1, 4, 18)[seed], seed)


@torch.no_grad()
def decode_in_pieces(model, idx, max_call, seed=0, tolerance=1e-4):
    """Compare with `logits` and `final_hidden`: ragged rows, random extend calls, rollbacks.

    Half of the calls end in wrong tokens, including eos, like rejected drafts.
    """
    rng, (B, T), device = random.Random(seed), idx.shape, idx.device
    want, hidden = model.logits(idx)[..., :60], model.final_hidden(idx)
    cache, done = model.new_cache(B, T, max_call), [0] * B
    while max(done) < T:  # nothing can be appended to a full row
        longest, is_draft = rng.choice([1, 2, max_call, T // 5, T // 2]), rng.random() < 0.5
        right = [min(rng.randint(1, longest), T - d) for d in done]
        wrong = [min(rng.randint(0, max_call), T - d - n) if is_draft else 0 for d, n in zip(done, right)]
        run = [n + w for n, w in zip(right, wrong)]
        tokens = torch.tensor([rng.choices([59, 3, 8], k=max(run)) for _ in range(B)], device=device)
        for b, n in enumerate(right):
            tokens[b, :n] = idx[b, done[b]:done[b] + n]
        every = is_draft or rng.random() < 0.5
        logits = model.extend(tokens, cache, torch.tensor(run, device=device), all_positions=every)[..., :60]
        for b, n in enumerate(right):
            got, expected = logits[b, :n] if every else logits[b:b + 1], want[b, done[b]:done[b] + n]
            assert (got - expected[-len(got):]).abs().max() < tolerance
            done[b] += n
            kept = min(run[b], max_call) - wrong[b]
            if kept > 0:
                assert (cache.hidden[b, :kept] - hidden[b, done[b] - kept:done[b]]).abs().max() < tolerance
        # correct tokens can be rolled back, too
        back = [rng.choice([0, 0, min(n, max_call - w)]) for n, w in zip(right, wrong)]
        cache.rollback(torch.tensor([n + w for n, w in zip(back, wrong)], device=device))
        done = [d - n for d, n in zip(done, back)]
        assert cache.lengths.tolist() == done


@pytest.mark.parametrize('variant', VARIANTS)
def test_short_extends_have_static_shapes_and_no_host_sync(variant, monkeypatch):
    """Meta tensors have no values, so code that would sync with a GPU fails here."""
    needs_extend(variant)
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

@pytest.mark.parametrize('variant', VARIANTS)
def test_loss_is_the_mean_nll_of_the_counted_targets(variant):
    model, idx = make(variant), some_tokens(2, 30)
    targets = torch.roll(idx, -1, 1)
    targets[1, 3:9] = -1
    if VARIANTS[variant][0] == 'context_ready' and model.config.K > 1:
        model.config.K = model.n_unrolls = 31  # T + 1 unrolls equal streaming, as in `final_hidden`
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


@pytest.mark.parametrize('variant', ALL_FILES)
def test_a_window_without_targets_has_zero_loss(variant):
    model, idx = make(variant).train(), some_tokens(2, 12)
    out = model(idx, torch.full_like(idx, -1))
    out['loss'].backward()
    assert out['nll'] == 0 and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('variant', WITH_DOCUMENTS)
def test_documents_do_not_see_each_other(variant):
    model, idx = make(variant), some_tokens(1, 20)
    idx[0, 9] = 59
    other = idx.clone()
    other[0, :9] = 1
    assert (model.logits(idx)[0, 10:, :60] - model.logits(other)[0, 10:, :60]).abs().max() < 1e-5


@pytest.mark.parametrize('variant', ALL_FILES)
def test_bf16_weights_and_autocast_stay_close_to_fp32(variant, device):
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


@pytest.mark.parametrize('variant', [*ONE_OF_EACH, 'context_ready'])
def test_checkpointed_blocks_run_twice_and_give_the_same_gradients(variant):
    (name, values), idx, found = VARIANTS[variant], some_tokens(2, 20), []
    for is_on in (False, True):
        more = dict(checkpoint_unrolls=is_on, dropout=0.3) if name == 'context_ready' else dict(checkpoint_blocks=is_on)
        torch.manual_seed(0)
        model, calls = small_model(name, values | more).train(), []
        for block in model.modules():
            if type(block).__name__ == 'Block':
                next(block.children()).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(idx, idx)['loss'].backward()
        found.append((len(calls), [p.grad for p in model.parameters()]))
    (once, want), (twice, got) = found
    future = len(getattr(model, 'future', []))  # MTP's heads, which are always checkpointed
    assert twice == 2 * (once - future) > 0
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize('variant', ALL_FILES)
def test_editing_logits_changes_loss_evaluation_and_decoding(variant, monkeypatch):
    """The edit is a soft cap with a learned scale."""
    model, idx = make(variant), some_tokens(2, 30)
    model.scale = torch.nn.Parameter(torch.tensor(1.7))
    if VARIANTS[variant][0] == 'context_ready' and model.config.K > 1:
        model.config.K = model.n_unrolls = 31  # streaming
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
        assert all(w.isfinite().all() for w in results[0]) and any(w.any() for w in results[0])
        errors = {name: float((got - w).abs().max() / (1 + w.abs().max()))
                  for (name, _), w, got in zip(model.named_parameters(), *results)}
        assert max(errors.values()) < 1e-4, errors
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
    *(('standard', dict(window=window)) for window in (None, 0, 3, 100)),
    ('sps', dict()), ('sps', dict(window=0)), ('sps', dict(window=3, predict_layers=2)),
    ('sps', dict(method='two_x_memory', window=None)), ('sps', dict(method='reverse_sps', window=50)),
    ('sps', dict(method='delayed_state', window=4, persistent_window=6))])
def test_flops_count_the_matrices_and_the_pairs_of_the_pattern(name, values):
    model, T, C = small_model(name, values | dict(eos_id=None)), 12, 32
    weights, pairs = 64 * C, 0
    for layer in range(3):
        keys, queries = model.streams(layer) if name == 'sps' else [(0,), (0,)]
        weights += len(keys) * 2 * C * C + len(queries) * (2 * C * C + 3 * C * 3 * C)  # k and v; q, output and MLP
        pairs += int(attn_kernels._whole_mask(model.sees, T, None, keys, queries, 'cpu').sum())
    assert model.flops_per_token(T) == pytest.approx(6 * weights + 12 * C * pairs / T)


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
    ('sps', dict(method='two_x_memory', window=64), 'window = 64 with method = two_x_memory, in which both streams '
                                                    'persist: set window = None'),
    ('sps', dict(predict_layers=13), 'predict_layers = 13: expected 1 to n_layer = 12, or None'),
    ('sps', dict(n_ids=50304), 'vocab_size = 50304 has no room for the 50304 ids of the tokenizer and <predict>'),
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
