"""Every fast form in attn_kernels.py against its reference in float64: values and gradients."""
import pytest
import torch
import torch.nn.functional as F
from conftest import plain_rms_norm, plain_rotation, run_apart
from test_models import make, some_tokens

import attn_kernels as K
from common import kernel_check


def documents(kind, B, T):
    """idx (B, T) whose id 9 ends documents."""
    idx = torch.zeros(B, T, dtype=torch.int64)
    if kind == 'many':
        idx[torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.2] = 9
    elif kind == 'edges':  # on and off block edges, eos first and last
        idx[0, [0, T - 1]] = 9
        idx[1, [i for i in (15, 255, 256, 299) if i < T]] = 9
    return idx


def gradients(function, *inputs):
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*inputs)
    cotangent = torch.cos(torch.arange(out.numel(), dtype=torch.float64,
                                       device=out.device)).view(out.shape).to(out.dtype)
    return out, *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], cotangent)


def assert_close(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max() <= tolerance * (1 + w.abs().max()), (g.double() - w).abs().max()


@pytest.mark.parametrize('T, window, kind, D', [
    (1, None, None, 16), (17, None, None, 16), (129, 0, 'many', 48), (300, 64, 'edges', 64), (300, None, 'edges', 70),
    (64, 1, None, 16), (520, None, 'many', 16), (520, 3, None, 64), (1100, 64, 'many', 16), (1100, None, 'edges', 16),
    (1100, None, None, 16)])
def test_attention_equals_dense_reference(T, window, kind, D, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, D, device=device)
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    want = gradients(lambda q, k, v: K.attention_reference(q, k, v, starts, window), *(x.double() for x in (q, k, v)))
    assert_close(gradients(lambda q, k, v: K.attention(q, k, v, starts, window), q, k, v), want, 2e-5)


@pytest.mark.parametrize('window, kind', [(None, None), (5, 'many')])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_query_heads_in_groups_read_one_key_head_each(window, kind, dtype, tolerance, device):
    """Against the same attention with each key head written out once for each query head that reads it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 70, heads, 16, device=device).to(dtype) for heads in (6, 2, 2))
    starts = None if kind is None else K.document_starts(documents(kind, 2, 70), 9).to(device)
    options = [None, window], starts
    for fast, reference, inputs in (
            (lambda q, k, v: K.two_stream_attention(q, k, v, *options),
             lambda q, k, v: K.two_stream_attention_reference(q, k, v, *options), (q, k, v)),
            (lambda q, k, v: K.attention(q, k, v, starts, window),
             lambda q, k, v: K.attention_reference(q, k, v, starts, window), (q[:, 0], k[:, 0], v[:, 0]))):
        def written_out(q, k, v, reference=reference):
            k, v = (torch.stack([x[..., h // 3, :] for h in range(6)], -2) for x in (k, v))
            return reference(q, k, v)
        want = gradients(written_out, *(x.double() for x in inputs))
        assert_close(gradients(reference, *(x.double() for x in inputs)), want, 1e-12)
        assert_close(gradients(fast, *inputs), want, tolerance)


@pytest.mark.parametrize('T, window, kind', [(64, None, None), (300, 64, 'edges'), (520, None, 'many'),
                                             (1100, 64, 'many')])
def test_attention_in_bf16_stays_close_to_float64(T, window, kind, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, 16, device=device).bfloat16()
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    want = gradients(lambda q, k, v: K.attention_reference(q, k, v, starts, window), *(x.double() for x in (q, k, v)))
    assert_close(gradients(lambda q, k, v: K.attention(q, k, v, starts, window), q, k, v), want, 1e-2)


@pytest.mark.parametrize('T, persistent, window, kind, queries', [
    (1, 'input', 0, None, 'both'), (17, 'predict', 1, 'many', 'both'), (129, 'both', None, 'many', 'predict'),
    (300, 'input', 64, 'edges', 'both'),
    (300, 'predict', 3, 'edges', 'input'), (520, 'input', 0, None, 'predict'), (520, 'input', 600, 'many', 'both'),
    (1100, 'input', 64, None, 'both'), (1100, 'predict', 64, 'edges', 'predict')])
def test_two_stream_attention_equals_dense_reference(T, persistent, window, kind, queries, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, T, 2, 16, device=device)
    if queries != 'both':
        q = q[:, :1]
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    for dtype, persistent_window, tolerance in ((torch.float32, None, 2e-5), (torch.float32, 5, 2e-5),
                                                (torch.bfloat16, None, 1e-2)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        options = K.stream_windows(persistent, window, persistent_window), starts, queries
        reference, fast = (lambda q, k, v, f=f, options=options: f(q, k, v, *options)
                           for f in (K.two_stream_attention_reference, K.two_stream_attention))
        want = gradients(reference, *(x.double() for x in inputs))
        assert_close(gradients(fast, *inputs), want, tolerance)


def test_one_tensor_may_be_query_key_and_value(device):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 70, 2, 16, device=device)
    want = K.two_stream_attention_reference(*[x.double()] * 3, [None, 3])
    assert_close([K.two_stream_attention(x, x, x, [None, 3])], [want], 2e-5)


def test_two_stream_attention_refuses_a_query_that_is_not_what_it_says():
    q = torch.zeros(1, 1, 4, 1, 2)
    with pytest.raises(ValueError, match="q has 1 streams and queries = 'both'"):
        K.two_stream_attention(q, q, q, [None, 1])


@pytest.mark.parametrize('variant', ['standard, window', 'sps, grouped queries'])
def test_an_edit_of_the_reference_is_decoded_too(variant, monkeypatch):
    model, idx, dense = make(variant), some_tokens(2, 9), K._dense_attention
    unedited = model.logits(idx)[..., :60]
    monkeypatch.setattr(K, '_dense_attention', lambda q, *rest: dense(2 * q, *rest))
    monkeypatch.setattr(K, 'REFERENCE', True)
    want, cache = model.logits(idx)[..., :60], model.new_cache(2, 9)
    got = [model.extend(idx[:, a:b], cache, all_positions=True) for a, b in ((0, 5), (5, 8), (8, 9))]
    assert (torch.cat(got, 1)[..., :60] - want).abs().max() < 1e-5 < (want - unedited).abs().max()


def even(visible):
    """An edit of the pattern: only keys at even distances."""
    def edited(query_pos, key_pos, doc_start=None, window=None):
        return visible(query_pos, key_pos, doc_start, window) & (
            (query_pos.unsqueeze(-1) - key_pos.unsqueeze(-2)) % 2 == 0)
    return edited


def ahead(visible):
    """One that widens it: the next key too. The tiles and the fused kernel leave it out."""
    return lambda query_pos, *rest: visible(query_pos + 1, *rest)


def mean_size(rms_norm):
    """An edit of the norm, whose gradient by hand is then wrong."""
    def edited(x, weight, eps, dtype):
        size = x.abs().mean(-1, keepdim=True) + eps
        return x / size * weight, 1 / size
    return edited


def squared(rotate):
    return lambda x, cos, sin: rotate(x.square(), cos, sin)


def smoothed(loss):
    return lambda hidden, weight, targets, row_weights=None: F.cross_entropy(
        hidden @ weight.T, targets, ignore_index=-1, label_smoothing=0.5)


@pytest.fixture
def fast_forms(monkeypatch):
    """`attn_kernels` as at its import, before and after the test: nothing is refused."""
    monkeypatch.setattr(K, 'use_triton', lambda q: False)
    monkeypatch.setattr(K, 'KERNELS_ON_CPU', False)
    monkeypatch.setattr(K, 'REFERENCE', False)
    monkeypatch.setattr(K, 'refused', set())
    kernel_check.check_operators.cache_clear()
    yield
    kernel_check.check_operators.cache_clear()


@pytest.mark.parametrize(('name', 'edit', 'form'), [
    ('visible', even, 'attention'), ('visible', ahead, 'attention'), ('_rms_norm', mean_size, 'norm'),
    ('_rotate', squared, 'rotation'), ('linear_cross_entropy_reference', smoothed, 'loss')])
def test_an_edit_of_a_definition_alone_trains(name, edit, form, fast_forms, monkeypatch, capsys):
    model, idx = make('standard'), some_tokens(2, 300)

    def trained():
        parameters = [p for _, p in sorted(model.named_parameters())]
        loss = model(idx[:, :-1], idx[:, 1:])['loss']
        return loss, torch.autograd.grad(loss, parameters)
    assert kernel_check.check_operators() == {} and not K.refused and not K.REFERENCE
    unedited, _ = trained()
    kernel_check.check_operators.cache_clear()
    monkeypatch.setattr(K, name, edit(getattr(K, name)))
    assert set(kernel_check.check_operators()) == {form}
    assert f'attn_kernels: the fast form of {form} differs' in capsys.readouterr().err
    loss, gradients = trained()
    assert abs(loss - unedited) > 1e-3
    direction = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                 for i, p in enumerate(gradients)]
    slope = sum((g.double() * d).sum() for g, d in zip(gradients, direction))
    model.double()
    step, losses = 1e-7, []
    for sign in (1, -2):
        with torch.no_grad():
            for (_, p), d in zip(sorted(model.named_parameters()), direction):
                p.add_(d, alpha=sign * step)
        losses.append(model(idx[:, :-1], idx[:, 1:])['loss'].item())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope.item(), rel=1e-3)  # gradients are the edit's


def test_a_wider_window_of_x_than_the_tiles_walk_is_attended_by_its_definition(fast_forms, monkeypatch, capsys):
    """Where rho persists, as in Reverse SPS."""
    pattern = K.two_stream_visible
    monkeypatch.setattr(K, 'two_stream_visible', lambda query_pos, x_pos, rho_pos, windows, *rest: pattern(
        query_pos, x_pos, rho_pos, [w if w is None else w + 50 * (i == 0) for i, w in enumerate(windows)], *rest))
    assert set(kernel_check.check_operators()) == {'attention'}
    assert 'two streams, predict persistent' in capsys.readouterr().err


def test_a_definition_that_sees_before_the_window_is_decoded(fast_forms, monkeypatch):
    """Attention sinks: the first tokens of a document are always seen."""
    model, idx, pattern = make('standard, window'), some_tokens(1, 60), K.visible
    monkeypatch.setattr(K, 'visible', lambda query_pos, key_pos, doc_start=None, window=None: (
        pattern(query_pos, key_pos, doc_start, window) | pattern(query_pos, key_pos, doc_start) & (
            key_pos.unsqueeze(-2) < (0 if doc_start is None else doc_start.unsqueeze(-1)) + 2)))
    assert set(kernel_check.check_operators()) == {'attention'}
    cache = model.new_cache(1, 60)
    found = torch.cat([model.extend(run, cache, all_positions=True) for run in idx.split(1, 1)], 1)
    torch.testing.assert_close(found, model.logits(idx))


class Scaled(torch.nn.Module):
    checkpoints = True

    @K.checkpointed
    def forward(self, x, scale):
        return (scale * x).sin()


def test_a_checkpointed_block_may_be_given_more_by_name():
    x, scale = (torch.tensor(value, requires_grad=True) for value in (0.3, 2.0))
    Scaled()(x, scale=scale).backward()
    torch.testing.assert_close([x.grad, scale.grad], [2 * torch.tensor(0.6).cos(), 0.3 * torch.tensor(0.6).cos()])


def reversed_kl(loss):
    """An edit of NextLat's KL alone: KL(q || p), which p does not learn from either."""
    def edited(states, weight, targets, counts, head_frozen=True):
        nll, _ = loss(states, weight, targets, counts, head_frozen)
        p = (states[0] @ weight.T).detach().log_softmax(-1)
        q = (states[1:] @ weight.detach().T).log_softmax(-1)
        return nll, ((q.exp() * (q - p)).sum(-1) * counts).sum() / counts.sum()
    return edited


def doubled_by_rows(loss):
    """An edit of the loss by rows' weights alone, which MTP and JTP take."""
    return lambda hidden, weight, targets, row_weights=None: loss(hidden, weight, targets, row_weights) * (
        1 if row_weights is None else 2)


@pytest.mark.parametrize(('name', 'edit', 'variant', 'part'), [
    ('linear_cross_entropy_kl_reference', reversed_kl, 'nextlat', 'kl'),
    ('linear_cross_entropy_reference', doubled_by_rows, 'mtp, documents', 'further_tokens')])
def test_an_edit_of_a_further_loss_alone_trains(name, edit, variant, part, fast_forms, monkeypatch):
    model, idx = make(variant), some_tokens(2, 30)
    unedited = model(idx[:, :-1], idx[:, 1:])[part]
    monkeypatch.setattr(K, name, edit(getattr(K, name)))
    assert set(kernel_check.check_operators(has_attention=False)) == {'loss'}
    assert abs(model(idx[:, :-1], idx[:, 1:])[part] - unedited) > 1e-4


def test_an_edit_that_the_comparison_cannot_follow_is_said_and_runs(fast_forms, monkeypatch, capsys):
    monkeypatch.delattr(K, '_rms_norm')
    assert kernel_check.check_operators(has_attention=False) == {} and not K.refused
    assert 'norm cannot be compared with its definition (NameError: ' in capsys.readouterr().err


@pytest.mark.parametrize('T', [40, 300])  # one mask, and one a tile
def test_layers_that_share_documents_share_masks(T, monkeypatch):
    made, visible = [], K.visible
    monkeypatch.setattr(K, 'use_triton', lambda q: False)
    monkeypatch.setattr(K, 'visible', lambda *args: made.append(args) or visible(*args))
    torch.manual_seed(0)
    x, doc_start = torch.randn(2, 2, T, 2, 16), K.document_starts(documents('many', 2, T), 9)
    calls = [lambda window=window: K.attention(x[:, 0], x[:, 0], x[:, 0], doc_start, window) for window in (None, 3)]
    calls += [lambda queries=queries: K.two_stream_attention(x[:, :1], x, x, [None, 3], doc_start, queries)
              for queries in ('input', 'predict')]
    first = [call() for call in calls]
    before = len(made)
    assert before >= 4 and all((call() == out).all() for call, out in zip(calls, first)) and len(made) == before
    monkeypatch.setattr(K, 'REFERENCE', True)
    assert_close(first, [call().double() for call in calls], 2e-5)


def test_document_starts():
    idx = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 9]])
    assert K.document_starts(idx, 9).tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert K.document_starts(idx, None) is None


@pytest.mark.parametrize('window, n_kv_head', [(None, 3), (0, 3), (5, 3), (None, 1), (5, 1)])
def test_a_cache_gives_the_rows_of_attention(window, n_kv_head, device):
    """A prompt, then runs of several lengths, one of them longer than max_run on a cache that is not empty."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 50, heads, 16, device=device) for heads in (3, n_kv_head, n_kv_head))
    tokens = documents('many', 2, 50).to(device)
    starts, rope = K.document_starts(tokens, 9), K.rope_table(torch.arange(50, device=device), 16, 10000.0)
    want = K.attention_reference(*(x.double() for x in (K.rotate(q, *rope), K.rotate(k, *rope), v)), starts, window)
    cache = K.KVCache(1, n_kv_head, 16, 2, 60, max_run=4, width=48, windows=[window], eos_id=9, device=device)
    got = []
    for a, b in ((0, 20), (20, 21), (21, 25), (25, 45), (45, 50)):
        place = cache.begin(tokens[:, a:b])
        got.append(cache.attend(place, 0, place.rotate(q[:, a:b]), place.rotate(k[:, a:b]), v[:, a:b]))
        last = cache.end(place, got[-1].flatten(2))
        assert torch.equal(last, got[-1][:, -1].flatten(1)) and torch.equal(cache.hidden[:, min(b - a, 4) - 1], last)
    assert_close([torch.cat(got, 1)], [want], 1e-5)


def test_rms_norm_and_rotate_equal_their_references(device):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 7, 4, 16, device=device), torch.randn(16, device=device)
    want = gradients(lambda x, w: plain_rms_norm(x, w, 1e-5), x.double(), weight.double())
    assert_close(gradients(lambda x, w: K.rms_norm(x, w, 1e-5), x, weight), want, 1e-5)
    rope = K.rope_table(torch.arange(7, device=device), 16, 10000.0)
    want = gradients(lambda x: plain_rotation(x, *(t.double() for t in rope)), x.double())
    assert_close(gradients(lambda x: K.rotate(x, *rope), x), want, 1e-5)


@pytest.mark.parametrize('scaling, of_hugging_face', [
    (None, {'rope_type': 'default'}),
    ('8,1,4,64', {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
                  'original_max_position_embeddings': 64}),
    ('4,1e9,2e9,64', {'rope_type': 'linear', 'factor': 4.0})])
def test_rotary_angles_are_those_of_hugging_face(scaling, of_hugging_face):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, max_position_embeddings=512,
                         rope_parameters={'rope_theta': 500000.0, **of_hugging_face})
    position = torch.arange(512)
    cos, sin = (x[0, :, :16] for x in LlamaRotaryEmbedding(config)(torch.zeros(1, 512, 32), position[None]))
    got = K.rope_table(position, 32, 500000.0, scaling)
    assert (got[0][:, 0] - cos).abs().max() < 1e-5 and (got[1][:, 0] - sin).abs().max() < 1e-5


@pytest.mark.parametrize('text', ['', '8', '8,1,4', '8,4,1,64', '0.5,1,4,64', '8,1,4,x', '8,1,4,nan', '8,1,inf,64'])
def test_a_rope_scaling_that_is_none_is_a_sentence(text):
    with pytest.raises(ValueError, match="expected 'factor,low,high,tokens'"):
        K.parse_rope_scaling(text)


@pytest.mark.parametrize('N, chunk', [(1, 2 ** 26), (40, 2 ** 26), (600, 300 * 320)])
def test_linear_cross_entropy_equals_reference(N, chunk, device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, 24, device=device), torch.randn(320, 24, device=device)
    targets = torch.randint(-1, 320, (N,), device=device)
    targets[0] = 3
    want = gradients(lambda h, w: K.linear_cross_entropy_reference(h, w, targets), hidden.double(), weight.double())
    got = gradients(lambda h, w: K.linear_cross_entropy(h, w, targets, chunk), hidden, weight)
    assert_close(got, want, 2e-5)
    with torch.no_grad():
        assert_close([K.linear_cross_entropy(hidden, weight, targets, chunk)], want[:1], 1e-5)
    with torch.autocast(device, torch.bfloat16):
        halves = gradients(lambda h, w: K.linear_cross_entropy(h, w, targets, chunk), hidden, weight)
    assert all((half - exact).norm() < 1e-2 * exact.norm() for half, exact in zip(halves, want))


def test_linear_cross_entropy_in_bf16_takes_the_log_sum_exp_in_fp32(device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 64, device=device), torch.randn(50304, 64, device=device) * 0.02
    targets = torch.randint(0, 50304, (512,), device=device)
    want = K.linear_cross_entropy_reference(hidden, weight, targets)
    with torch.autocast(device, torch.bfloat16):
        assert abs(K.linear_cross_entropy(hidden, weight, targets) - want) < 2e-3


@pytest.mark.parametrize('loss_of', [K.linear_cross_entropy, K.linear_cross_entropy_reference])
def test_linear_cross_entropy_of_hopeless_targets_and_of_none(loss_of, device):
    hidden = torch.tensor([[200.0, 0.0]], device=device)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    assert loss_of(hidden, weight, torch.tensor([1], device=device)) == 200
    loss, grad = gradients(lambda h: loss_of(h, weight, torch.tensor([-1], device=device)), hidden)
    assert loss == 0 and (grad == 0).all()


@pytest.mark.parametrize('d, chunk, head_frozen', [(1, 2 ** 26, True), (1, 2 ** 26, False), (3, 300 * 320, False),
                                                   (2, 300 * 320, True)])
def test_linear_cross_entropy_kl_equals_reference(d, chunk, head_frozen, device):
    torch.manual_seed(0)
    states, weight = torch.randn(1 + d, 600, 24, device=device), torch.randn(320, 24, device=device) * 0.4
    targets = torch.randint(-1, 320, (600,), device=device)
    counts = torch.rand(d, 600, device=device) < 0.7
    def both(function):
        return gradients(lambda s, w: torch.stack(function(s, w)) * torch.tensor([1.0, 0.3], device=device),
                         states.double(), weight.double())
    want = both(lambda s, w: K.linear_cross_entropy_kl_reference(s, w, targets, counts, head_frozen))
    assert_close(both(lambda s, w: K.linear_cross_entropy_kl(s, w, targets, counts, head_frozen, chunk)), want, 1e-6)
    def in_parts(s, w):
        return (torch.stack(K.linear_cross_entropy_kl(s, w, targets, counts, head_frozen, chunk))
                * torch.tensor([1.0, 0.3], device=device))
    assert_close(gradients(in_parts, states, weight), want, 2e-5)
    with torch.autocast(device, torch.bfloat16):
        halves = gradients(in_parts, states, weight)
    for half, exact in zip(*(losses[0] / torch.tensor([1.0, 0.3], device=device) for losses in (halves, want))):
        assert abs(half - exact) < 2e-3 * (1 + exact)
    assert all((half - exact).norm() < 1e-2 * exact.norm() for half, exact in zip(halves[1:], want[1:]))


def test_weighted_linear_cross_entropy_equals_reference(device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 24, device=device), torch.randn(320, 24, device=device)
    row_weights = torch.rand(600, device=device)
    targets = torch.randint(-1, 320, (600,), device=device)
    want = gradients(lambda h, w: K.linear_cross_entropy_reference(h, w, targets, row_weights.double()),
                     hidden.double(), weight.double())
    assert_close(gradients(lambda h, w: K.linear_cross_entropy(h, w, targets, 300 * 320, row_weights), hidden, weight),
                 want, 2e-5)


def test_a_compiler_does_not_unroll_the_parts_of_the_loss_on_a_cpu():
    hidden, weight, targets = torch.randn(200, 8, requires_grad=True), torch.randn(50304, 8), torch.arange(200)
    sizes = []

    def count(graph, _):
        sizes.extend(len(part.graph.nodes) for part in graph.modules() if hasattr(part, 'graph'))
        return graph
    compiled = torch.compile(lambda h: K.linear_cross_entropy(2 * h, weight, targets), backend=count)
    loss = compiled(hidden)
    loss.backward()
    assert sum(sizes) < 20
    want = K.linear_cross_entropy_reference(2 * hidden, weight, targets)
    assert abs(loss - want) < 1e-4
    assert torch.allclose(hidden.grad, torch.autograd.grad(want, hidden)[0], atol=1e-6)


def test_what_starts_without_compiling_does_not_load_the_compiler():
    result = run_apart('-c', "import sys, eval, sample, model_standard; sys.exit('torch._dynamo' in sys.modules)")
    assert result.returncode == 0, result.stderr
