"""Gated DeltaNet: both forms against the paper's recurrence, the whole model against the paper, decoding, bad input."""
import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import attn_kernels
import model_gdn as G
from common import settings

scan = attn_kernels.import_scan('gdn')
SMALL = dict(n_layer=2, n_head=2, n_embd=24, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, chunk_len=5)


def make(**values):
    """A float64 model whose every weight matters, and windows (3, 23) with ends of documents (59)."""
    torch.manual_seed(0)
    model = G.Model(G.Config(**SMALL | values)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25 if p.dim() == 2 else 0.7)
    idx = torch.randint(0, 60, (3, 23))
    idx[torch.rand(3, 23) < 0.15] = 59
    return model, idx


@pytest.fixture(params=['loop', 'fast'])
def form(request):
    if request.param == 'fast' and scan is None:
        pytest.skip('scans/ is not here')
    return request.param


def loss_and_gradients(model, idx):
    loss = model(idx, idx.roll(-1, 1))['loss']
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


# ---- the recurrence ----

def by_the_recurrence(q, k, v, log_decay, beta, starts):
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, of each row and head.

    Returns o (B, T, H, D) and the last S (B, H, D, K).
    """
    B, T, H, K = k.shape
    reads, last = [], []
    for b in range(B):
        for h in range(H):
            S = torch.zeros(v.shape[-1], K, dtype=k.dtype)
            for t in range(T):
                if starts is not None and starts[b, t]:
                    S = torch.zeros_like(S)
                alpha, key = log_decay[b, t, h].exp(), k[b, t, h]
                transition = alpha * (torch.eye(K, dtype=k.dtype) - beta[b, t, h] * torch.outer(key, key))
                S = S @ transition + beta[b, t, h] * torch.outer(v[b, t, h], key)
                reads.append(S @ q[b, t, h])
            last.append(S)
    return (torch.stack(reads).view(B, H, T, -1).transpose(1, 2),
            torch.stack(last).view(B, H, v.shape[-1], K))


def some_inputs(T, dtype=torch.float64, decay=1.0, K=6, D=5):
    torch.manual_seed(T)
    q, k = (F.normalize(torch.randn(2, T, 2, K, dtype=dtype), dim=-1) for _ in range(2))
    v, log_decay = torch.randn(2, T, 2, D, dtype=dtype), -decay * torch.rand(2, T, 2, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, log_decay, torch.rand(2, T, 2, dtype=dtype))]


@pytest.mark.parametrize('T', [1, 2, 8, 13])
@pytest.mark.parametrize('chunk_len', [4, 64])
@pytest.mark.parametrize('documents', [False, True])
def test_every_form_is_the_papers_recurrence_with_all_gradients(form, T, chunk_len, documents):
    """In float64 to 1e-9, for lengths that no chunk divides and documents that start anywhere in one."""
    model, _ = make(chunk_len=chunk_len, scan=form, d_k=6, d_v=5)
    model.choose_scan()
    inputs, starts = some_inputs(T), torch.rand(2, T) < 0.25 if documents else None
    want = by_the_recurrence(*inputs, starts)
    memory = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    if form == 'fast':
        got = scan.scan_chunks(memory, *inputs, starts, None, chunk_len)
    else:
        got = model.scan(memory, *inputs, is_doc_start=starts)
    got = got[0], got[1].transpose(-1, -2)
    weights = [torch.randn_like(x) for x in want]

    def gradients(outputs):
        return torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights)), inputs)
    for expected, x in zip([*want, *gradients(want)], [*got, *gradients(got)]):
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(None in map(importlib.util.find_spec, ('fla', 'einops')), reason='needs fla-core and einops')
def test_the_recurrence_is_that_of_flash_linear_attention(form):
    """Values, the last memory and all gradients to 1e-6 of the largest. Its slow reference computes in fp32."""
    package, = importlib.util.find_spec('fla').submodule_search_locations  # its other files ask for a GPU
    theirs = runpy.run_path(f'{package}/ops/gated_delta_rule/naive.py')['naive_recurrent_gated_delta_rule']
    inputs, memory = some_inputs(37, torch.float32, K=16, D=8), torch.zeros(2, 2, 16, 8)
    q, k, v, log_decay, beta = inputs
    want = theirs(q, k, v, beta, log_decay, scale=1, output_final_state=True)
    got = (scan.scan_chunks(memory, *inputs, None, None, 64) if form == 'fast' else
           make()[0].loop(memory, *inputs))
    weights = [torch.randn_like(x) for x in want]

    def gradients(outputs):
        return torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights)), inputs)
    for expected, x in zip([*want, *gradients(want)], [*got, *gradients(got)]):
        assert (x - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.skipif(scan is None or attn_kernels.triton is None, reason='needs scans/ and Triton')
@pytest.mark.parametrize('T, chunk_len, K, D, documents', [
    (1, 64, 16, 32, False), (13, 4, 6, 5, True), (40, 16, 16, 33, True), (33, 32, 24, 64, False),
    (70, 64, 40, 16, True)])
def test_the_kernel_is_the_papers_recurrence_with_all_gradients(T, chunk_len, K, D, documents, kernels_device,
                                                                monkeypatch):
    calls, launch = [], scan._walk_in_triton
    monkeypatch.setattr(scan, '_walk_in_triton', lambda *args: calls.append(args[-1]) or launch(*args))
    exact = some_inputs(T, K=K, D=D)
    inputs = [x.detach().float().to(kernels_device).requires_grad_() for x in exact]
    starts = torch.rand(2, T) < 0.1 if documents else None
    want = by_the_recurrence(*exact, starts)
    memory = torch.zeros(2, 2, K, D, device=kernels_device)
    got = scan.scan_chunks(memory, *inputs, None if starts is None else starts.to(kernels_device), None, chunk_len)
    got = got[0], got[1].transpose(-1, -2)
    weights = [torch.randn_like(x) for x in want]
    of_exact = torch.autograd.grad(sum((x * w).sum() for x, w in zip(want, weights)), exact)
    of_kernel = torch.autograd.grad(sum((x * w.to(x)).sum() for x, w in zip(got, weights)), inputs)
    assert calls == [False, True]  # on, and back
    for expected, x in zip([*want, *of_exact], [*got, *of_kernel]):
        torch.testing.assert_close(x.double().cpu(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
def test_a_walk_is_an_operator_whose_shapes_and_gradient_a_compiler_may_trust():
    torch.manual_seed(0)
    sizes = (2, 3, 6, 5), (4, 2, 3, 8, 6), (4, 2, 3, 8, 6), (4, 2, 3, 8, 5), (4, 2, 3)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    torch.library.opcheck(scan.walk, inputs,
                          test_utils=('test_schema', 'test_autograd_registration', 'test_faketensor'))
    assert torch.autograd.gradcheck(scan.walk, [x[:1, :1] if x.dim() == 4 else x[:2, :1, :1] for x in inputs])


@pytest.mark.parametrize('documents', [False, True])
def test_a_scan_goes_on_from_a_memory_and_skips_tokens_that_are_not_there(form, documents):
    model, _ = make(chunk_len=4, scan=form, d_k=6, d_v=5)
    model.choose_scan()
    inputs = [x.detach() for x in some_inputs(13)]
    starts = torch.rand(2, 13) < 0.25 if documents else None
    part = lambda a, b: [x[:, a:b] for x in inputs]
    cut = lambda a, b: None if starts is None else starts[:, a:b]
    whole, last = model.scan(torch.zeros(2, 2, 6, 5, dtype=torch.float64), *inputs, is_doc_start=starts)
    reads, memory = model.scan(torch.zeros_like(last), *part(0, 6), is_doc_start=cut(0, 6))
    more, end = model.scan(memory, *part(6, 13), is_doc_start=cut(6, 13))
    torch.testing.assert_close(torch.cat([reads, more], 1), whole)
    torch.testing.assert_close(end, last)
    active = torch.tensor([[True] * 6 + [False] * 7, [True] * 2 + [False] * 11])
    _, got = model.scan(torch.zeros_like(last), *inputs, is_doc_start=starts, active=active)
    _, second = model.scan(torch.zeros_like(last), *part(0, 2), is_doc_start=cut(0, 2))
    torch.testing.assert_close(got, torch.stack([memory[0], second[1]]))


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
def test_strong_decay_in_fp32_overflows_nothing():
    """A chunk's decays multiply to less than fp32 holds; values and gradients are those of float64."""
    wide = some_inputs(40, decay=60.0)
    narrow = [x.detach().float().requires_grad_() for x in wide]
    found = []
    for inputs in (wide, narrow):
        reads, _ = scan.scan_chunks(torch.zeros(2, 2, 6, 5, dtype=inputs[0].dtype), *inputs, None, None, 64)
        found.append([reads, *torch.autograd.grad(reads.square().sum(), inputs)])
    for want, got in zip(*found):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


# ---- the model ----

def by_the_paper(model, idx):
    """What the head multiplies for one window (T, C), one token and one head at a time, norms written out; each token
    with all tokens of its document before it."""
    w, c = dict(model.named_parameters()), model.config
    T = len(idx)

    def rms(x, name):
        return x / (x.square().mean() + c.norm_eps).sqrt() * w[name + '.weight']

    def unit(x):
        return x / (x.square().sum() + 1e-6).sqrt()

    def linear(x, name):
        return w[name + '.weight'] @ x

    document = [int((idx[:t] == 59).sum()) if c.eos_id == 59 else 0 for t in range(T)]
    h = [w['embed.weight'][x] for x in idx]
    for i in range(c.n_layer):
        n, K, D, H = f'blocks.{i}.', c.d_k, c.d_v, c.n_head
        x = [rms(y, n + 'memory_norm') for y in h]
        projected = [linear(y, n + 'qkv') for y in x]
        S = [torch.zeros(D, K, dtype=torch.float64) for _ in range(H)]
        for t in range(T):
            if t and document[t] != document[t - 1]:
                S = [torch.zeros_like(s) for s in S]
            near = [j for j in range(c.conv_size) if t - j >= 0 and document[t - j] == document[t]]
            mixed = F.silu(sum(w[n + 'conv'][:, c.conv_size - 1 - j] * projected[t - j] for j in near))
            q, k, v = mixed.split([H * K, H * K, H * D])
            beta = linear(x[t], n + 'beta').sigmoid()
            alpha = (-w[n + 'log_rate'].exp() * F.softplus(linear(x[t], n + 'decay') + w[n + 'dt_bias'])).exp()
            gate, read = F.silu(linear(x[t], n + 'read_gate')), []
            for m in range(H):
                key, value = unit(k[m * K:(m + 1) * K]), v[m * D:(m + 1) * D]
                S[m] = alpha[m] * S[m]
                S[m] = S[m] + beta[m] * torch.outer(value - S[m] @ key, key)
                read.append(rms(S[m] @ unit(q[m * K:(m + 1) * K]) / K ** 0.5, n + 'out_norm'))
            h[t] = h[t] + linear(torch.cat(read) * gate, n + 'read_out')
            gate, up = linear(rms(h[t], n + 'ffn_norm'), n + 'gate_up').split(c.n_ffn)
            h[t] = h[t] + linear(F.silu(gate) * up, n + 'ffn_out')
    return torch.stack([rms(y, 'norm') for y in h])


@pytest.mark.parametrize('eos_id', [None, 59])
def test_the_model_is_the_papers(form, eos_id):
    model, idx = make(eos_id=eos_id, scan=form)
    with torch.no_grad():
        want, got = by_the_paper(model, idx[0]), model.final_hidden(idx[:1])[0]
    assert (got - want).norm() < 1e-10 * want.norm()


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
@pytest.mark.parametrize('eos_id', [None, 59])
@pytest.mark.parametrize('T, chunk_len', [(1, 5), (2, 1), (23, 5), (23, 64)])
def test_both_forms_give_the_same_loss_and_gradients(eos_id, T, chunk_len):
    model, idx = make(eos_id=eos_id, chunk_len=chunk_len)
    found = []
    for name in ('loop', 'fast'):
        model.config.scan = name
        model.choose_scan()
        found.append(loss_and_gradients(model, idx[:, :T]))
    for want, got in zip(*found):
        assert (got - want).norm() <= 1e-10 * (want.norm() + 1e-6)


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_an_unedited_model_is_fast_and_says_nothing(dtype, capsys):
    model = G.Model(G.Config(**SMALL)).to(dtype)
    assert model.choose_scan()['scan'] == 'fast' and capsys.readouterr().err == ''


class UndecayedError(G.Model):
    """The error as in GPN: of the memory before it decays."""

    def step(self, memory, q, k, v, log_decay, beta):
        error = v - G.read(memory, k)
        memory = log_decay.exp()[..., None, None] * memory + k[..., None] * (beta[..., None] * error)[..., None, :]
        return G.read(memory, q), memory


def test_an_edit_of_the_equation_trains_and_decodes_and_says_so(capsys):
    model, idx = make(eos_id=59)
    edited = UndecayedError(model.config).double()
    edited.load_state_dict(model.state_dict())
    loss = edited(idx, idx)['loss']
    assert edited.scan_report['scan'] == 'loop' and abs(loss - model(idx, idx)['loss']) > 1e-4
    assert scan is None or 'differs from the equations' in capsys.readouterr().err
    assert all(x.abs().sum() > 0 for x in torch.autograd.grad(loss, list(edited.parameters())))
    cache = edited.new_cache(3, 23, max_run=4)
    torch.testing.assert_close(edited.extend(idx, cache, all_positions=True)[..., :60], edited.logits(idx)[..., :60])


class WriteOfQuery(G.Model):
    """The query is written too."""

    def step(self, memory, q, k, v, log_decay, beta):
        memory = log_decay.exp()[..., None, None] * memory
        error = v - G.read(memory, k)
        memory = memory + (k + 0.5 * q).unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
        return G.read(memory, q), memory


class DecayOfEachKey(G.Model):
    """A decay for each dimension of a key: the shapes of what a token gives `step` change."""

    def __init__(self, config):
        super().__init__(config)
        H, K = config.n_head, config.d_k
        for block in self.blocks:
            block.decay = torch.nn.Linear(config.n_embd, H * K, bias=False)
            block.log_rate = torch.nn.Parameter(torch.rand(H, K))
            block.dt_bias = torch.nn.Parameter(torch.randn(H, K))

    def step(self, memory, q, k, v, log_decay, beta):
        memory = log_decay.exp().unsqueeze(-1) * memory
        memory = memory + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - G.read(memory, k))).unsqueeze(-2)
        return G.read(memory, q), memory


class LearnedStart(G.Model):
    def empty_memory(self, batch_size, device=None):
        return super().empty_memory(batch_size, device) + 1


def test_an_edit_of_the_empty_memory_is_one_of_every_document():
    model, idx = make(eos_id=59)
    edited, second = LearnedStart(model.config).double(), idx[:1].clone()
    edited.load_state_dict(model.state_dict())
    second[:, 9] = 59
    moved = (edited.logits(second) - model.logits(second))[..., :60].abs().amax(-1)
    assert edited.scan_report['scan'] == 'loop' and (moved > 1e-3).all()


@pytest.mark.parametrize('edit', [WriteOfQuery, DecayOfEachKey, LearnedStart])
def test_decoding_follows_an_edit_in_whatever_calls(edit, capsys):
    """A prompt, single tokens, and a run of which all but one is forgotten and read again."""
    model, idx = edit(make(eos_id=59)[0].config).double(), make()[1]
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25 if p.dim() == 2 else 0.7)
    assert model(idx, idx)['loss'].isfinite() and model.scan_report['scan'] == 'loop'
    cache, found = model.new_cache(3, 23, max_run=4), []
    for a, b in [(0, 9), *((t, t + 1) for t in range(9, 15)), (15, 19), (16, 23)]:
        cache.rollback(int(cache.lengths[0]) - a)
        found[a:] = model.extend(idx[:, a:b], cache, all_positions=True).unbind(1)
    torch.testing.assert_close(torch.stack(found, 1)[..., :60], model.logits(idx)[..., :60], rtol=1e-9, atol=1e-9)


class Noisy(G.Block):
    """Dropout, and noise of another kind: neither is part of the memory's equation."""

    def forward(self, h, convolve, remember):
        h = F.dropout(super().forward(h, convolve, remember), 0.2, self.training)
        return h + 0.1 * torch.randn_like(h) if self.training else h


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
def test_chance_outside_of_the_memory_does_not_keep_the_fast_form_from_being_chosen(capsys):
    model, idx = make(eos_id=59)
    for block in model.blocks:
        block.__class__ = Noisy
    state = torch.get_rng_state()
    assert model.choose_scan()['scan'] == 'fast' and capsys.readouterr().err == ''
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (model.train()(idx, idx)['loss'] for _ in range(2))
    assert first != second


@pytest.mark.skipif(scan is None, reason='scans/ is not here')
def test_a_fast_form_that_is_wrong_from_call_to_call_alone_is_not_taken(monkeypatch):
    """In training nothing is made of the memory after a window."""
    right = scan.scan_chunks

    def wrong(*args):
        reads, memory = right(*args)
        return reads, 0.9 * memory
    monkeypatch.setattr(scan, 'scan_chunks', wrong)
    report = make()[0].choose_scan()
    assert (report['scan'], report['where']) == ('loop', 'the cached states')


def test_an_edit_that_cannot_decode_yet_is_trained_and_a_line_says_so(monkeypatch, capsys):
    """What is convolved is wider than what the cache keeps."""
    model, idx = make()
    want, convolve = model(idx, idx)['loss'].item(), G.Cache.convolve
    monkeypatch.setattr(G.Cache, 'convolve', lambda self, layer, x, weight: convolve(self, layer, x[..., 1:], weight))
    model, _ = make()
    assert model(idx, idx)['loss'].item() == pytest.approx(want, rel=1e-9)
    assert model.scan_report['scan'] == 'loop' and 'Decoding fails (RuntimeError: ' in capsys.readouterr().err
    monkeypatch.setattr(G.Model, 'step', lambda self, *tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make()[0](idx, idx)


def test_without_scans_the_equation_runs(monkeypatch):
    model, idx = make(eos_id=59)
    want = loss_and_gradients(model, idx)
    monkeypatch.setattr(G, 'fast', None)
    assert model.choose_scan()['scan'] == 'loop'
    for x, expected in zip(loss_and_gradients(model, idx), want):
        assert (x - expected).norm() <= 1e-10 * expected.norm()


def test_the_loop_holds_the_memory_of_segments_not_of_steps():
    model, _ = make(chunk_len=8, scan='loop')
    inputs, held = some_inputs(32), {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.loop(torch.zeros(2, 2, 6, 5, dtype=torch.float64), *inputs)
    assert sum(held.values()) <= 4 * 8 * 2 * 2 * 6 * 5 + sum(x.nbytes for x in inputs)


@pytest.mark.long
def test_a_compiled_model_gives_the_same_loss_and_gradients():
    model, idx = make(n_layer=2, eos_id=59)
    want = loss_and_gradients(model, idx)
    torch.compile(model.final_hidden, backend='aot_eager', fullgraph=scan is not None)(idx)  # else it raises
    loss = torch.compile(model, backend='aot_eager')(idx, idx.roll(-1, 1))['loss']
    for got, expected in zip([loss, *torch.autograd.grad(loss, list(model.parameters()))], want):
        assert (got - expected).norm() <= 1e-10 * expected.norm()


def test_a_token_sees_its_own_document_alone(form):
    model, idx = make(eos_id=59, scan=form)
    idx[:, 9] = 59
    other = idx.clone()
    other[:, :9] = 1
    assert torch.equal(model.logits(idx)[:, 10:], model.logits(other)[:, 10:])


def test_a_cache_is_as_large_for_any_length_and_keeps_its_memory_in_fp32():
    model = G.Model(G.Config(**SMALL)).to(torch.bfloat16)
    caches = [model.new_cache(2, max_tokens) for max_tokens in (10, 100_000)]
    assert caches[0].nbytes == caches[1].nbytes and caches[0].memory.dtype == torch.float32


# ---- sizes and settings ----

def test_the_papers_row_has_130_5_million_parameters_and_1_97_million_numbers_of_state():
    values = settings.read_config_file(str(Path('config/gdn_130m.py')))
    with torch.device('meta'):
        model = G.Model(G.Config(**{k: v for k, v in values.items() if k in G.Config.__dataclass_fields__}))
        cache = model.new_cache(1, 2048)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 130.5
    assert cache.memory.numel() == 1_966_080 and model.config.n_ffn == 1472
    assert model.head.weight is not model.embed.weight


def test_flops_are_those_counted_by_hand():
    model, _ = make(n_layer=3)
    H, K, D, C = 2, 8, 12, 24
    layer = C * H * (2 * K + D) + 2 * C * H + 2 * C * H * D + 3 * C * 40  # q k v, beta and decay, gate and out, SwiGLU
    memory = H * 2 * (K * D + K * D + K * D)  # found by the key, written, read by the query
    for T in (1, 100):
        assert model.flops_per_token(T) == 3 * (3 * (2 * layer + memory) + 2 * C * 64)


def test_initial_weights_are_those_of_the_official_code():
    torch.manual_seed(0)
    model = G.Model(G.Config(n_layer=2, n_embd=128, n_head=64, d_k=8, d_v=16, vocab_size=512, n_ids=512))
    for name, p in model.named_parameters():
        if name.endswith('log_rate'):
            assert 0 < p.exp().min() < 2 and 14 < p.exp().max() < 16
        elif name.endswith('dt_bias'):
            assert 9e-4 < F.softplus(p).min() < 3e-3 and 0.05 < F.softplus(p).max() < 0.11
        elif p.dim() == 1:
            assert (p == 1).all()
        else:
            assert abs(p.std() / 0.02 - 1) < 0.05


@pytest.mark.parametrize('values, sentence', [
    (dict(n_head=0), 'n_head = 0: expected more than 0'),
    (dict(chunk_len=0), 'chunk_len = 0: expected more than 0'),
    (dict(conv_size=1), 'conv_size = 1: expected 2 to 64 taps'),
    (dict(n_ffn=0), 'n_ffn = 0: expected at least 1, or None'),
    (dict(scan='quick'), "scan = 'quick': expected 'auto', 'loop' or 'fast'"),
    (dict(eos_id=60), 'eos_id = 60: expected one of the 60 ids'),
    (dict(vocab_size=9), 'vocab_size = 9 has no room for the 60 ids')])
def test_bad_values_are_sentences(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        G.Config(**SMALL | values)


def test_a_bias_that_is_added_starts_at_0_and_that_of_the_decay_does_not(monkeypatch):
    plain = G.Block

    def with_bias(config, layer):
        block = plain(config, layer)
        block.beta = torch.nn.Linear(*block.beta.weight.shape[::-1])
        return block
    monkeypatch.setattr(G, 'Block', with_bias)
    block = G.Model(G.Config(**SMALL)).blocks[0]
    assert not block.beta.bias.any() and block.dt_bias.all()
