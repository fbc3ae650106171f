"""Every fast form in attn_kernels.py against its reference in float64: values and gradients."""
import pytest
import torch
import torch.nn.functional as F

import attn_kernels as K
from scans import delta_rule
from scans import gpn as scan


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
    cotangent = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=out.device)).view(out.shape).to(out.dtype)
    return out, *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], cotangent)


def assert_close(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max() <= tolerance * (1 + w.abs().max()), (g.double() - w).abs().max()


@pytest.mark.parametrize('T, window, kind, D', [
    (1, None, None, 16), (17, None, None, 16), (129, 0, 'many', 48), (300, 64, 'edges', 64), (300, None, 'edges', 70),
    (64, 1, None, 16), (520, None, 'many', 16), (520, 3, None, 64), (1100, 64, 'many', 16), (1100, None, 'edges', 16), (1100, None, None, 16)])
def test_attention_equals_dense_reference(T, window, kind, D, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, D, device=device)
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    want = gradients(lambda q, k, v: K.attention_reference(q, k, v, starts, window), *(x.double() for x in (q, k, v)))
    assert_close(gradients(lambda q, k, v: K.attention(q, k, v, starts, window), q, k, v), want, 2e-5)


@pytest.mark.parametrize('T, window, kind', [(64, None, None), (300, 64, 'edges'), (520, None, 'many'), (1100, 64, 'many')])
def test_attention_in_bf16_stays_close_to_float64(T, window, kind, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, 16, device=device).bfloat16()
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    want = gradients(lambda q, k, v: K.attention_reference(q, k, v, starts, window), *(x.double() for x in (q, k, v)))
    assert_close(gradients(lambda q, k, v: K.attention(q, k, v, starts, window), q, k, v), want, 1e-2)


@pytest.mark.parametrize('T, persistent, window, kind, queries', [
    (1, 'input', 0, None, 'both'), (17, 'predict', 1, 'many', 'both'), (129, 'both', None, 'many', 'predict'), (300, 'input', 64, 'edges', 'both'),
    (300, 'predict', 3, 'edges', 'input'), (520, 'input', 0, None, 'predict'), (520, 'input', 600, 'many', 'both'),
    (1100, 'input', 64, None, 'both'), (1100, 'predict', 64, 'edges', 'predict')])
def test_two_stream_attention_equals_dense_reference(T, persistent, window, kind, queries, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, T, 2, 16, device=device)
    if queries != 'both':
        q = q[:, :1]
    starts = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    for dtype, persistent_window, tolerance in ((torch.float32, None, 2e-5), (torch.float32, 5, 2e-5), (torch.bfloat16, None, 1e-2)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        options = persistent, window, starts, persistent_window, queries
        want = gradients(lambda q, k, v: K.two_stream_attention_reference(q, k, v, *options), *(x.double() for x in inputs))
        assert_close(gradients(lambda q, k, v: K.two_stream_attention(q, k, v, *options), *inputs), want, tolerance)


def test_two_stream_attention_refuses_a_query_that_is_not_what_it_says():
    q = torch.zeros(1, 1, 4, 1, 2)
    with pytest.raises(ValueError, match="q has 1 streams and queries = 'both'"):
        K.two_stream_attention(q, q, q, 'input', 1)


def test_document_starts():
    idx = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 9]])
    assert K.document_starts(idx, 9).tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert K.document_starts(idx, None) is None


@pytest.mark.parametrize('window', [None, 0, 5])
def test_a_cache_gives_the_rows_of_attention(window, device):
    """A prompt, then runs of several lengths, one of them longer than max_run on a cache that is not empty."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 50, 3, 16, device=device)
    tokens = documents('many', 2, 50).to(device)
    starts, rope = K.document_starts(tokens, 9), K.rope_table(torch.arange(50, device=device), 16, 10000.0)
    want = K.attention_reference(*(x.double() for x in (K.rotate(q, *rope), K.rotate(k, *rope), v)), starts, window)
    cache = K.KVCache(1, 3, 16, 2, 60, max_run=4, width=48, windows=[window], eos_id=9, device=device)
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
    want = gradients(lambda x, w: K.rms_norm_reference(x, w, 1e-5), x.double(), weight.double())
    assert_close(gradients(lambda x, w: K.rms_norm(x, w, 1e-5), x, weight), want, 1e-5)
    rope = K.rope_table(torch.arange(7, device=device), 16, 10000.0)
    want = gradients(lambda x: K.rotate_reference(x, *(t.double() for t in rope)), x.double())
    assert_close(gradients(lambda x: K.rotate(x, *rope), x), want, 1e-5)


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


def test_linear_cross_entropy_in_bf16_takes_the_log_sum_exp_in_fp32(device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 64, device=device), torch.randn(50304, 64, device=device) * 0.02
    targets = torch.randint(0, 50304, (512,), device=device)
    want = K.linear_cross_entropy_reference(hidden, weight, targets)
    with torch.autocast(device, torch.bfloat16):
        assert abs(K.linear_cross_entropy(hidden, weight, targets) - want) < 2e-3


def test_linear_cross_entropy_of_hopeless_targets_and_of_none(device):
    hidden = torch.tensor([[200.0, 0.0]], device=device)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    assert K.linear_cross_entropy(hidden, weight, torch.tensor([1], device=device)) == 200
    loss, grad = gradients(lambda h: K.linear_cross_entropy(h, weight, torch.tensor([-1], device=device)), hidden)
    assert loss == 0 and (grad == 0).all()


@pytest.mark.parametrize('d, chunk, head_frozen', [(1, 2 ** 26, True), (1, 2 ** 26, False), (3, 300 * 320, False), (2, 300 * 320, True)])
def test_linear_cross_entropy_kl_equals_reference(d, chunk, head_frozen, device):
    torch.manual_seed(0)
    states, weight = torch.randn(1 + d, 600, 24, device=device), torch.randn(320, 24, device=device) * 0.4
    targets = torch.randint(-1, 320, (600,), device=device)
    counts = torch.rand(d, 600, device=device) < 0.7
    def both(function):
        return gradients(lambda s, w: torch.stack(function(s, w)) * torch.tensor([1.0, 0.3], device=device), states.double(), weight.double())
    want = both(lambda s, w: K.linear_cross_entropy_kl_reference(s, w, targets, counts, head_frozen))
    assert_close(both(lambda s, w: K.linear_cross_entropy_kl(s, w, targets, counts, head_frozen, chunk)), want, 1e-6)
    got = gradients(lambda s, w: torch.stack(K.linear_cross_entropy_kl(s, w, targets, counts, head_frozen, chunk))
                    * torch.tensor([1.0, 0.3], device=device), states, weight)
    assert_close(got, want, 2e-5)
    with torch.autocast(device, torch.bfloat16):
        for half, exact in zip(K.linear_cross_entropy_kl(states, weight, targets, counts, head_frozen, chunk), want[0] / torch.tensor([1.0, 0.3], device=device)):
            assert abs(half - exact) < 2e-3 * (1 + exact)


def test_weighted_linear_cross_entropy_equals_reference(device):
    torch.manual_seed(0)
    hidden, weight, row_weights = torch.randn(600, 24, device=device), torch.randn(320, 24, device=device), torch.rand(600, device=device)
    targets = torch.randint(-1, 320, (600,), device=device)
    want = gradients(lambda h, w: K.linear_cross_entropy_reference(h, w, targets, row_weights.double()), hidden.double(), weight.double())
    assert_close(gradients(lambda h, w: K.linear_cross_entropy(h, w, targets, 300 * 320, row_weights), hidden, weight), want, 2e-5)


def delta_rule_equals_its_reference(S, B, H, K_, D, keep, device):
    """Writes and reads of S steps, and their gradients, beside autograd through the definition in float64."""
    torch.manual_seed(0)
    k, q = (F.normalize(torch.randn(S, B, H, K_, device=device).relu(), dim=-1) for _ in range(2))
    v, to_read = torch.randn(2, S, B, H, D, device=device)
    log_decay, beta, memory, to_memory = -torch.rand(S, B, H, device=device), torch.rand(S, B, H, device=device), *torch.randn(2, B, H, K_, D, device=device)
    keep = (torch.rand(S, B, 1, device=device) > 0.3).float() if keep else None
    at = lambda t: None if keep is None else keep[t]

    exact = [x.double().requires_grad_() for x in (q, k, v, beta, log_decay, memory)]
    m, reads = exact[5], []
    for t in range(S):
        m, read = delta_rule.delta_step_reference(m, *(x[t] for x in exact[1:3]), exact[4][t].exp(), exact[3][t], exact[0][t], None if keep is None else keep[t].double())
        reads.append(read)
    (torch.stack(reads) * to_read).sum().add((m * to_memory).sum()).backward()

    decay, now = log_decay.exp(), memory.clone()
    got = [delta_rule.delta_step(now, k[t], v[t], decay[t], beta[t], q[t], at(t)) for t in range(S)]
    memories = delta_rule.delta_replay(memory, k, v, decay, beta, keep)
    assert_close([torch.stack(got), now, memories[-1]], [torch.stack(reads), m, m], 1e-5)
    grad, grads = to_memory.clone(), []
    for t in reversed(range(S)):
        grads.append(delta_rule.delta_step_backward(grad, memories[t], k[t], v[t], decay[t], beta[t], q[t], to_read[t], at(t)))
    assert_close([torch.stack(x[::-1]) for x in zip(*grads)] + [grad], [x.grad for x in exact], 1e-5)


@pytest.mark.parametrize('shape', [(5, 2, 3, 8, 12), (3, 1, 1, 1, 1)])
@pytest.mark.parametrize('keep', [False, True])
def test_delta_rule_equals_its_reference(shape, keep):
    delta_rule_equals_its_reference(*shape, keep, 'cpu')


def gpn_pieces_equal_their_definitions(answers, N, C, H, K_, D, dtype, device, tolerance):
    """`gate`, `glu` and `heads` with their gradients, beside the definitions in float64 and autograd; z are columns of a wider tensor."""
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
    columns = lambda width: random(N, width + 7)[:, 3:width + 3]
    unit = lambda x, eps: x / (x.square().sum(-1, keepdim=True) + eps ** 2).sqrt()
    wide = torch.promote_types(dtype, torch.float32)

    def expect(definition, inputs, cotangents):
        inputs = [x.double().clone().requires_grad_() for x in inputs]
        outputs = definition(*inputs)
        return outputs, torch.autograd.grad(outputs, inputs, [x.double() for x in cotangents])

    z, x, add, d, dn = columns(C), random(N, C).to(wide), columns(C), random(N, C).to(wide), random(N, C)
    want = expect(lambda z, x, add: [y := torch.sigmoid(z) * x + add, unit(y, 0.3)], [z, x, add], [d, d])[0]
    assert_close(scan.gate(z, x, add, 0.3, dtype), want, tolerance)
    opened, (n, length) = torch.sigmoid(z.to(wide)), scan.unit(x, 0.3)
    want = expect(lambda x: [unit(x, 0.3), opened.double() * x], [x], [dn, d])[1]
    assert_close([scan.gate_gradient(dn, n, 1 / length, d, opened)], want, tolerance)

    n = H * D if answers else 0
    z, answer, dy, out, y = columns(2 * C + n), random(N, n) if answers else None, random(N, C + n), columns(2 * C + n), random(N, C + n)
    both = expect(lambda z, *a: [F.silu(z[:, :C + n]) * torch.cat([z[:, C + n:], *(unit(x, 0.3) for x in a)], 1)],
                  [z] + [answer] * answers, [dy])
    assert_close([scan.glu(z, answer, 0.3, dtype)], both[0], tolerance)
    grads = [out, scan.glu_gradient(dy, z, answer, 0.3, out, y)]
    assert_close([y, *grads[:1 + answers]], [*both[0], *both[1]], tolerance)

    rate, z, out = random(H).to(wide).exp(), columns(H * (2 * K_ + D + 2)), columns(H * (2 * K_ + D + 2))
    cotangents = [random(N, H, *shape).to(wide) for shape in ((K_,), (K_,), (D,), (), ())]

    def definition(z, rate):
        q, k, v, beta, decay = z.split([H * K_, H * K_, H * D, H, H], 1)
        q, k = (unit(x.relu().unflatten(1, (H, K_)), 0.3) for x in (q, k))
        return [q, k, v.unflatten(1, (H, D)), -rate * F.softplus(decay), torch.sigmoid(beta)]

    (q, k, v, log, beta), (dz, drate) = expect(definition, [z, rate], cotangents)
    assert_close(scan.heads(z, rate, H, K_, 0.3), [q, k, v, log.exp(), beta], tolerance)
    dq, dk, dv, dlog, dbeta = cotangents
    assert_close([scan.heads_gradient(z, rate, 0.3, out, dq, dk, dv, dbeta, dlog).sum(0), out], [drate, dz], tolerance)
    z, out = z[:, :H * K_], out[:, :H * K_]
    assert_close(scan.heads(z, None, H, K_, 0.3)[:1], [q], tolerance)
    scan.heads_gradient(z, None, 0.3, out, dq)
    assert_close([out], [dz[:, :H * K_]], tolerance)


GPN_PIECES = [(True, 3, 20, 2, 8, 12), (False, 1, 1, 1, 1, 1), (True, 5, 70, 3, 33, 130)]


@pytest.mark.parametrize('shape', GPN_PIECES)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gpn_pieces_equal_their_definitions(shape, dtype, tolerance):
    gpn_pieces_equal_their_definitions(*shape, dtype, 'cpu', tolerance)
