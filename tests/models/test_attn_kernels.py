"""Values and gradients of attn_kernels.py against float64, and edited attention patterns."""
import copy
import functools
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import run_subprocess, succeeded
from references import assert_close, decode, dense_attention, dense_mask, gradients, some_tokens
from variants import make, small_model

import attn_kernels as K
import model_nextlat


def pattern(method=None, **values):
    """Return a model_standard, or a model_sps with a method, for its `sees`."""
    if method:
        values = dict(method=method, window=None if method == 'two_x_memory' else 64) | values
    return small_model('sps' if method else 'standard', values)


def documents(kind, B, T):
    """Return doc_start of rows in which id 9 ends a document, or None for no documents."""
    if kind is None:
        return None
    idx = torch.zeros(B, T, dtype=torch.int64)
    if kind == 'many':
        idx[torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.2] = 9
    else:  # at and near tile edges, eos first and last
        idx[0, [0, T - 1]] = 9
        idx[1, [i for i in (15, 63, 64, 255, 256, 299) if i < T]] = 9
    return K.document_starts(idx, 9)


X, RHO, BOTH = (0,), (1,), (0, 1)
@pytest.mark.parametrize('method, values, T, kind, queries, heads', [  # heads: of q, of k, size
    (None, {}, 1, None, X, (2, 2, 16)), (None, {}, 300, 'edges', X, (2, 2, 70)), (None, {}, 1100, None, X, (2, 1, 16)),
    (None, dict(window=0), 129, 'many', X, (2, 2, 48)), (None, dict(window=64), 300, 'edges', X, (6, 2, 64)),
    (None, dict(window=3), 520, None, X, (2, 2, 64)), (None, dict(window=64), 1100, 'many', X, (2, 2, 16)),
    ('sps', dict(window=0), 1, None, BOTH, (2, 2, 16)), ('sps', {}, 300, 'edges', BOTH, (6, 2, 16)),
    ('sps', dict(window=0), 520, None, RHO, (2, 2, 16)), ('sps', dict(window=600), 520, 'many', BOTH, (2, 2, 16)),
    ('sps', dict(persistent_window=5), 300, 'edges', BOTH, (2, 2, 48)), ('sps', {}, 1100, None, BOTH, (2, 2, 16)),
    ('delayed_state', dict(window=1), 17, 'many', BOTH, (2, 2, 16)),
    ('delayed_state', {}, 1100, 'edges', RHO, (2, 2, 16)), ('reverse_sps', dict(window=3), 300, 'edges', X, (2, 2, 64)),
    ('two_x_memory', {}, 129, 'many', RHO, (2, 2, 70))])
def test_attention_equals_dense_masked_attention(method, values, T, kind, queries, heads, device):
    """Also checks the forward of FlexAttention, uncompiled on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention
    torch.manual_seed(0)
    (H, HK, D), keys = heads, BOTH if method else X
    model, doc_start = pattern(method, **values), documents(kind, 2, T)
    model.config.n_head, model.config.n_kv_head, model.config.head_size = heads
    q, k, v = (torch.randn(2, len(streams) * T, n, D) for streams, n in ((queries, H), (keys, HK), (keys, HK)))
    seen = dense_mask(model.sees, T, doc_start, keys, queries)
    mask = K.make_mask(model, T, device, None if doc_start is None else doc_start.to(device), keys, queries)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        rounded = [x.to(dtype) for x in (q, k, v)]
        want = gradients(lambda q, k, v: dense_attention(q, k, v, seen), *(x.double() for x in rounded))
        got = gradients(lambda q, k, v: K.attention(q, k, v, mask), *(x.to(device) for x in rounded))
        assert_close([x.cpu() for x in got], want, tolerance)
    block_mask, _ = K.flex_mask(model.sees, None, T, 'cpu', doc_start, keys, queries)
    got = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, enable_gqa=H != HK)
    want = dense_attention(*(x.double() for x in (q, k, v)), seen)
    assert_close([got.transpose(1, 2)], [want], 1e-5)


def test_flex_attention_visits_at_most_15_percent_more_pairs_than_needed():
    T, sees = 4096, pattern('sps').sees
    tokens = K.sequence(T, BOTH, 'cpu')
    blocks, _ = K.flex_mask(sees, None, T, 'cpu', None, BOTH, BOTH)
    visited = (blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()).item() * 128 ** 2
    assert visited <= 1.15 * K._seen(sees, tokens, tokens).sum().item()


@pytest.mark.parametrize('T', [129, 520])
@pytest.mark.parametrize('method, values, queries', [
    (None, {}, X), (None, dict(window=64), X), ('sps', {}, BOTH), ('sps', dict(window=0), RHO),
    ('sps', dict(persistent_window=5), X), ('delayed_state', {}, RHO), ('two_x_memory', {}, BOTH)])
def test_block_masks_equal_those_of_pytorch(method, values, queries, T):
    """All eight tensors, to the end of each list, for unedited and edited patterns."""
    from torch.nn.attention.flex_attention import create_block_mask
    model, keys = pattern(method, **values), BOTH if method else X
    every_third = lambda q, k: model.sees(q, k) & ((q.pos - k.pos) % 3 == 0)
    with_sinks = functools.partial(sinks(type(model).sees), model)
    for sees in (model.sees, every_third, with_sinks):
        for kind in (None, 'edges', 'many'):
            got, _ = K.flex_mask(sees, None, T, 'cpu', documents(kind, 2, T), keys, queries)
            B = 1 if kind is None else 2
            want = create_block_mask(got.mask_mod, B, None, len(queries) * T, len(keys) * T, 'cpu')
            for name in (f'{full}{axis}_{of}' for full in ('', 'full_') for axis in 'q kv'.split()
                         for of in ('num_blocks', 'indices')):
                a, b = getattr(got, name), getattr(want, name)
                assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride(), (name, kind)


# ---- edited patterns: only `sees` changes ----

def sinks(sees):
    """Attention sinks: make the first 4 tokens of a document always visible."""
    return lambda self, q, k: sees(self, q, k) | (k.pos < q.pos) & (k.pos >= q.doc_start) & (k.pos < q.doc_start + 4)


def dilated(sees):
    return lambda self, q, k: sees(self, q, k) & ((q.pos - k.pos) % 2 == 0)


def wider(sees):
    return lambda self, q, k: sees(self, q, k) | (k.pos < q.pos) & (k.pos >= q.doc_start) & (q.pos - k.pos <= 60)


@pytest.mark.parametrize('edit', [sinks, dilated, wider])
@pytest.mark.parametrize('variant', [
    'standard, window', 'sps', 'sps, window 1, no documents, untied', 'sps, beyond the paper', 'reverse_sps',
    'roformer, extra FFN, window', 'context_ready, documents, window'])
def test_editing_sees_changes_training_and_decoding(variant, edit, monkeypatch, capsys):
    model, idx = make(variant), some_tokens(2, 120)
    loss, logits = model(idx, idx.roll(-1, 1))['loss'], model.logits(idx)[..., :60]
    monkeypatch.setattr(type(model), 'sees', edit(type(model).sees))
    assert abs(model(idx, idx.roll(-1, 1))['loss'] - loss) > 1e-5
    want = model.logits(idx)[..., :60]
    assert (want - logits).abs().max() > 1e-2
    assert (decode(model, idx, [80, 1, 1, 4, 2, 20, 1, 11]) - want).abs().max() < 1e-4
    assert capsys.readouterr().err == ''


def test_flex_attention_gets_one_dtype(monkeypatch):
    """Autocast of PyTorch 2.12 and later leaves normed queries and keys in fp32."""
    from torch.nn.attention import flex_attention
    monkeypatch.setattr(K, 'compiled', lambda function: function)
    monkeypatch.setattr(flex_attention, 'flex_attention', lambda q, k, v, *args, **options: (q.dtype, k.dtype, v.dtype))
    q = torch.zeros(1, 1, 4, 8)
    assert K._flex_attention(q, q, q.bfloat16(), None, None) == (torch.bfloat16,) * 3


def test_a_pattern_in_which_a_token_sees_nothing_is_refused(monkeypatch):
    model = make('standard')
    monkeypatch.setattr(type(model), 'sees', lambda self, q, k: k.pos < q.pos)
    with pytest.raises(ValueError, match='attend to no key'):
        model.logits(torch.zeros(1, 1, dtype=torch.int64))


@torch.no_grad()  # masks of training are other ones
def test_masks_without_documents_are_kept_until_the_pattern_changes():
    """That is its code or a plain value. A pattern that reads a tensor is evaluated each time."""
    model, idx = make('standard'), some_tokens(1, 40)
    numbers = [model.sees, pattern(window=3).sees, lambda q, k: torch.stack([k.pos <= q.pos, q.pos - k.pos < 9]).all(0)]
    model.far = torch.tensor(2)
    near = lambda q, k: (k.pos <= q.pos) & (q.pos - k.pos <= model.far.clone())
    model.reaches, model.rule = [{'near': 9}, (3, 8)], 'list'  # changed in place below
    listed = lambda q, k: (k.pos <= q.pos) & (q.pos - k.pos <= (model.reaches[0]['near'] if model.rule else 2))
    nearer = lambda q, k: (k.pos <= q.pos) & (q.pos - k.pos < int(model.far))
    before = model.logits(idx)
    for edit in (lambda: setattr(model, 'reach', 3), lambda: setattr(model, 'sees', near), lambda: model.far.fill_(5),
                 lambda: model.far.data.fill_(6), lambda: setattr(model, 'far', torch.tensor(7)),
                 lambda: setattr(model, 'sees', nearer), lambda: model.far.data.fill_(4),
                 lambda: setattr(model, 'sees', listed), lambda: model.reaches[0].update(near=5),
                 lambda: model.reaches.insert(0, {'near': 4}), lambda: setattr(model, 'rule', '')):
        edit()
        logits = model.logits(idx)
        assert not torch.equal(logits, before)
        assert torch.equal(logits, copy.deepcopy(model).logits(idx))  # a copy has no masks yet
        before = logits
    for model.sees in (*numbers, listed, numbers):
        mask, again = K.make_mask(model, 40, 'cpu'), K.make_mask(model, 40, 'cpu')
        assert mask is again and copy.deepcopy(model).kept_masks == {}


@pytest.mark.parametrize('window, slots', [(None, 100), (0, 4), (5, 9), (200, 100)])
def test_cache_size_follows_the_reach_of_the_pattern(window, slots):
    for name, of_all in (('standard', 0), ('sps', 100)):  # one stream of SPS sees all positions
        cache = small_model(name, dict(window=window)).new_cache(1, 100)
        assert cache.k[0].shape[2] == of_all + slots + 1  # plus the spare slot
    early = lambda q, k: (k.pos <= q.pos) & ((q.pos - k.pos <= 5) | (q.pos == 1000))
    assert K._reach(early, 3000, 0, 1, 'cpu') == 1000  # evaluated in chunks


# ---- the loss ----

@pytest.mark.parametrize('N, width', [(1, 320), (40, 320), (600, 2 ** 18)])
def test_chunked_loss_equals_the_loss_of_all_rows(N, width, device):
    def fn(h, targets, weights):
        lengths.append(len(h))
        nll = F.cross_entropy(head(h).float(), targets, ignore_index=-1, reduction='none')
        return {'weighted': (weights * nll).sum(), 'nll': nll.detach().sum()}  # the second is to log

    torch.manual_seed(0)
    head, unused, lengths = torch.nn.Linear(24, 320, device=device), torch.nn.Linear(2, 2, device=device), []
    hidden, weights = torch.randn(N, 24, device=device, requires_grad=True), torch.rand(N, device=device)
    targets = torch.randint(-1, 320, (N,), device=device)
    targets[0] = 3
    params = [*head.parameters(), *unused.parameters()]
    exact = copy.deepcopy(head).double()
    h = hidden.detach().double().requires_grad_()
    nll = F.cross_entropy(exact(h), targets, ignore_index=-1, reduction='none')
    want_loss, want_part = (weights.double() * nll).sum(), nll.sum()
    want = [3 * g for g in torch.autograd.grad(want_loss, [h, *exact.parameters()])]

    loss, part = K.chunked_loss(fn, (hidden, targets, weights), params, width).values()
    assert max(lengths) - min(lengths) <= 1 and len(lengths) == (3 if N == 600 and device == 'cpu' else 1)
    (3 * loss).backward()
    assert_close([loss, part], [want_loss.detach(), want_part.detach()], 1e-6)
    assert_close([hidden.grad, *(p.grad for p in head.parameters())], want, 2e-5)
    assert not part.requires_grad and all(p.grad is None for p in unused.parameters())
    with torch.no_grad():
        assert_close(K.chunked_loss(fn, (hidden, targets, weights), params, width).values(),
                     [want_loss.detach(), want_part.detach()], 1e-6)
    with torch.autocast(device, torch.bfloat16):
        loss = K.chunked_loss(fn, (hidden, targets, weights), params, width)['weighted']
    halves = torch.autograd.grad(3 * loss, [hidden, *head.parameters()])
    assert all((half - w).norm() < 1e-2 * w.norm() for half, w in zip(halves, want))


def test_weights_that_share_a_gradient_are_counted_once():
    """A head W + U has one gradient for both, b.sum() an expanded one; over several chunks."""
    torch.manual_seed(0)
    W, U, b = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((24, 320), (24, 320), (320,)))
    h = torch.randn(600, 24)

    def fn(h):
        return {'loss': (h @ (W + U)).square().sum() + b.sum()}
    for width in (320, 2 ** 18):
        K.chunked_loss(fn, (h,), [W, U, b], width)['loss'].backward()
        n_chunks = 1 if width == 320 else 3
        want, = torch.autograd.grad((h @ (W + U)).square().sum(), [W])
        assert (W.grad - want).abs().max() < 1e-5 * want.abs().max() and torch.equal(W.grad, U.grad)
        assert (b.grad == n_chunks).all()
        W.grad = U.grad = b.grad = None


@pytest.mark.slow
@pytest.mark.parametrize('name, n_ids', [('cross_entropy', None), ('cross_entropy', 300), ('nextlat', 300)])
def test_a_compiled_loss_equals_eager_and_compiles_once(name, n_ids, device):
    """Chunks of all lengths, ignored targets; a second compilation without gradients."""
    if not shutil.which(os.environ.get('CXX', 'g++')) or not Path(sysconfig.get_path('include'), 'Python.h').exists():
        pytest.skip('no C++ compiler, or no headers of Python')
    from torch._dynamo.utils import counters
    torch.compiler.reset()
    counters.clear()
    V, C, d, module = 320, 16, 0, K.CrossEntropy(320, n_ids)
    if name == 'nextlat':
        values = dict(n_layer=1, n_head=1, n_embd=C, vocab_size=V, n_ids=n_ids, pad_rows_in_loss=False)
        d, module = 2, model_nextlat.Losses(model_nextlat.Config(horizon=2, stop_target=False, **values))
    compiled = copy.deepcopy(module)
    compiled.compile(dynamic=module.dynamic)
    for N, dtype, tolerance in ((769, torch.float32, 1e-6), (101, torch.float32, 1e-6), (769, torch.bfloat16, 2 ** -8)):
        torch.manual_seed(N)
        logits, states = 3 * torch.randn(1 + d, N, V, device=device), torch.randn(1 + d, N, C, device=device)
        weights, targets = torch.rand(N, 1 + d, device=device), torch.randint(-1, 300, (N,), device=device)

        def run(module, *inputs):
            if not d:
                return module(*inputs, targets).view(1)
            parts = module(('next_hidden', 'kl', 'ce'), targets, weights, weights, inputs[1 + d:], inputs[:1 + d])
            return torch.stack([*parts.values()])
        results, inputs = [], [*logits.to(dtype), *(states if d else ())]
        for side in (module, compiled):
            with torch.no_grad():
                without = run(side, *inputs)
            results.append([*gradients(functools.partial(run, side), *inputs), without])
        for want, got in zip(*results):
            assert (got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max()
    assert counters['stats']['unique_graphs'] == 4  # two for each dtype


@pytest.mark.slow
def test_scripts_that_compile_nothing_do_not_load_the_compiler():
    code = "import sys, eval, sample, model_standard; sys.exit('torch._dynamo' in sys.modules)"
    succeeded(run_subprocess('-c', code))
