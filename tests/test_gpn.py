"""The Grounded Prediction Network: the loop against the paper's equations, the scan against the loop, sizes, bad input."""
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import attn_kernels
import model_gpn as G
from common import settings
from scans import gpn as scan

SMALL = dict(n_layer=1, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, segment_len=5)


def make(**values):
    """A float64 model whose every weight matters, norms and biases included, and windows (3, 23) with ends of documents (59)."""
    torch.manual_seed(0)
    model = G.Model(G.Config(**SMALL | values)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2 if p.dim() == 2 else 0.7)
    idx = torch.randint(0, 60, (3, 23))
    idx[torch.rand(3, 23) < 0.15] = 59
    return model, idx


@pytest.fixture(params=['in C', 'in operators'])
def form(request, monkeypatch):
    """Each of the two forms that the steps have on CPU."""
    monkeypatch.setattr(scan, 'COMPILE', request.param == 'in C')
    if request.param == 'in C' and not scan.GPNInC.serves(torch.device('cpu'), torch.float64):
        pytest.skip('no C compiler here')


def by_the_paper(model, idx):
    """States of one window (T, C) from the equations, row vectors, one head at a time, norms written out."""
    w, c = dict(model.named_parameters()), model.config
    rms = lambda x, name: x / (x.square().mean() + c.norm_eps).sqrt() * w[name + '.weight']
    linear = lambda x, name: w[name + '.weight'] @ x + w.get(name + '.bias', 0)
    unit = lambda x: x / (x.square().sum() + 1e-12).sqrt()
    heads = range(c.n_head)
    s = g = torch.zeros(c.n_embd, dtype=torch.float64)
    memory, states = [torch.zeros(c.d_v, c.d_k, dtype=torch.float64) for _ in heads], []
    for x in idx:
        last = g
        g = torch.sigmoid(linear(rms(s, 'ground_norm'), 'ground_gate')) * s + linear(rms(w['embed.weight'][x], 'embed_norm'), 'fuse')  # eq. 4
        if c.n_head:
            now, key = rms(g, 'write.norm'), linear(rms(last, 'write.norm'), 'write.key')
            values, beta = linear(now, 'write.value'), torch.sigmoid(linear(now, 'write.beta'))
            gamma = -w['write.log_rate'].exp() * F.softplus(linear(now, 'write.decay') + w['write.dt_bias'])  # eq. 9
            for h in heads:
                k, v = unit(key[h * c.d_k:(h + 1) * c.d_k].relu()), values[h * c.d_v:(h + 1) * c.d_v]  # eq. 8
                memory[h] = gamma[h].exp() * memory[h] + beta[h] * torch.outer(v - memory[h] @ k, k)  # eq. 10
        s = g
        for i in range(c.n_layer):
            n = f'layers.{i}.'
            gate, up = linear(rms(s, n + 'ffn_norm'), n + 'gate_up').split(c.n_ffn)
            new = torch.sigmoid(linear(rms(s, n + 'gate_norm'), n + 'gate')) * s + linear(F.silu(gate) * up, n + 'ffn_out')  # eq. 5
            if c.n_head:
                query = linear(rms(s, n + 'read_norm'), n + 'query')
                answer = torch.cat([memory[h] @ unit(query[h * c.d_k:(h + 1) * c.d_k].relu()) for h in heads])
                new = new + linear(F.silu(linear(rms(s, n + 'read_norm'), n + 'read_gate')) * rms(answer, n + 'answer_norm'), n + 'read_out')  # eq. 11
            s = new
        states.append(s)
    return torch.stack(states)


@pytest.mark.parametrize('n_layer, n_head', [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_the_loop_is_the_papers_equations(n_layer, n_head):
    model, idx = make(n_layer=n_layer, n_head=n_head)
    with torch.no_grad():
        want, got = by_the_paper(model, idx[0]), model.loop(idx)[0]
    assert (got - want).norm() < 1e-10 * want.norm()


@pytest.mark.parametrize('n_layer, n_head', [(1, 0), (1, 2), (2, 0), (2, 2), (3, 1)])
@pytest.mark.parametrize('bptt_len', [None, 5, 7, 1])
@pytest.mark.parametrize('eos_id', [None, 59])
def test_the_scan_is_the_loop_with_all_gradients(n_layer, n_head, bptt_len, eos_id, form):
    """In float64, for lengths that no segment and no piece of truncated BPTT divides."""
    model, idx = make(n_layer=n_layer, n_head=n_head, bptt_len=bptt_len, eos_id=eos_id)
    targets, results = idx.roll(-1, 1), []
    for states in (model.loop(idx), model.states(idx)):
        loss = F.cross_entropy(model.head(model._decoded(states)).flatten(0, 1), targets.flatten())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for want, got in zip(*results):
        assert (got - want).norm() < 1e-8 * want.norm()
    with torch.no_grad():
        assert (model.states(idx) - states).norm() < 1e-8 * states.norm()


@pytest.mark.parametrize('T, segment_len', [(1, 5), (2, 1), (23, 100)])
def test_any_length_and_any_segments(T, segment_len, form):
    model, idx = make(segment_len=segment_len)
    idx = idx[:, :T]
    want, got = (torch.autograd.grad(states.sum(), model.write.key.bias)[0] for states in (model.loop(idx), model.states(idx)))
    assert (got - want).norm() <= 1e-8 * want.norm()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('rows', [1, 3, 8, 21])
def test_steps_in_c_are_those_in_operators(rows, dtype, monkeypatch):
    """At a size that all threads share, of rows that fill no tile, one, or some: states and gradients."""
    if not scan.GPNInC.serves(torch.device('cpu'), dtype):
        pytest.skip('no C compiler here')
    model = make(n_layer=2, n_head=3, n_embd=256, n_ffn=150, d_k=33, d_v=70, eos_id=59, bptt_len=6, vocab_size=70)[0].to(dtype)
    for p in model.parameters():
        p.data *= 0.1 if p.dim() == 2 else 1
    idx, results = torch.randint(50, 60, (rows, 9)), []
    for compile in (False, True):
        monkeypatch.setattr(scan, 'COMPILE', compile)
        results.append(loss_and_gradients(model, idx))
    for want, got in zip(*results):
        assert (got - want).norm() < (1e-9 if dtype == torch.float64 else 1e-4) * want.norm()


@torch.no_grad()
def decoding_is_the_loop(device, dtype, tolerance):
    """A prompt, runs of several lengths, rows that end early, and runs taken back, over ends of documents."""
    model, idx = make(n_layer=2, eos_id=59)
    for p in model.parameters():
        p.data *= 0.5 if p.dim() == 2 else 1
    want = model._logits(model._decoded(model.loop(idx))).to(device)
    model, idx = model.to(device, dtype), idx.to(device)
    cache = model.new_cache(3, 23, max_run=4)
    lengths = torch.tensor([5, 3, 9], device=device)
    got = model.extend(idx[:, :9], cache, lengths)
    at = lengths.clone()
    for row in range(3):
        torch.testing.assert_close(got[row].double(), want[row, at[row] - 1], rtol=tolerance, atol=tolerance)
    for n, back in ((4, 2), (3, torch.tensor([0, 1, 3], device=device)), (1, 0), (4, 4)):
        tokens = torch.stack([idx[row, at[row]:at[row] + n] for row in range(3)])
        got = model.extend(tokens, cache, all_positions=True)
        for row in range(3):
            torch.testing.assert_close(got[row].double(), want[row, at[row]:at[row] + n], rtol=tolerance, atol=tolerance)
        cache.rollback(back)
        at += n - back


def test_decoding_is_the_loop(form):
    decoding_is_the_loop('cpu', torch.float64, 1e-8)


def test_a_weight_that_is_not_a_number_shows(form):
    model, idx = make()
    model.layers[0].query.bias.data[0] = float('nan')
    assert model.states(idx).isnan().any()


def test_a_cache_keeps_its_weights(form):
    model, idx = make()
    cache, changed = model.new_cache(3, 23), model.new_cache(3, 23)
    want = model.extend(idx, cache)
    for name, p in model.named_parameters():
        if name.startswith(('ground', 'write', 'layers')):
            p.data += 1
    torch.testing.assert_close(model.extend(idx, changed), want)


def test_states_do_not_see_the_document_before():
    model, idx = make(eos_id=59)
    idx[0, 9] = 59
    other = idx.clone()
    other[0, :9] = 1
    assert torch.equal(model.states(idx)[0, 10:], model.states(other)[0, 10:])


def test_memory_is_not_held_at_every_step():
    """What the scan keeps for the backward, in bytes, is the formula in model_gpn.py."""
    T, B, c = 64, 2, G.Config(**SMALL | dict(segment_len=8))
    saved = scan._scan_outputs(torch.empty(T, B, c.n_embd), scan.Sizes.of(c), torch.float32, 8, T, True)
    products = 2 * c.n_embd + 2 * c.n_ffn + c.n_head * (3 * c.d_v + 2 * c.d_k + 2)
    assert sum(x.numel() for x in saved) == T * B * (c.n_embd + products) + T // 8 * B * c.n_head * c.d_k * c.d_v


def test_a_cache_is_as_large_for_any_length():
    model, _ = make()
    assert model.new_cache(2, 10).nbytes == model.new_cache(2, 100_000).nbytes


@pytest.mark.parametrize('name, millions', [('gpn_130m', 129.2), ('gpn_2l', 132.8), ('gpn_nomem', 130.5)])
def test_parameters_at_the_papers_sizes(name, millions):
    values = settings.read_config_file(str(Path('config') / f'{name}.py'))
    with torch.device('meta'):
        model = G.Model(G.Config(**{k: v for k, v in values.items() if k in G.Config.__dataclass_fields__}))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize('values, sentence', [
    (dict(n_head=-1), 'n_head = -1: expected a number of memory heads, 0 for no memory'), (dict(d_k=0), 'd_k = 0: expected more than 0'),
    (dict(bptt_len=0), 'bptt_len = 0: expected at least 1, or None'), (dict(segment_len=0), 'segment_len = 0: expected more than 0'),
    (dict(vocab_size=9), 'vocab_size = 9 has no room for the 60 ids')])
def test_bad_values_are_sentences(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        G.Config(**SMALL | values)


def test_products_in_bf16_stay_close():
    """The dtypes of training on a GPU, on whatever there is: state and memory in fp32, products and what is kept of them in bf16."""
    model, idx = make(n_layer=2)
    model = model.float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    u, folded, results = model._fused(idx).transpose(0, 1).detach(), [w.detach().requires_grad_() for w in model._folded()], []
    for dtype in (torch.float32, torch.bfloat16):
        states = scan.scan(u, None, folded, scan.Sizes.of(model.config), 1e-6, dtype, 5, 23)
        results.append([states, *torch.autograd.grad(states.square().sum(), folded)])
        assert states.dtype == torch.float32
    for want, got in zip(*results):
        assert (got - want).norm() < 0.05 * want.norm()


class Rerun:
    """Stands for a CUDA graph: the same tensors go in and come out each time."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, [x if x is None else x.clone() for x in inputs]
        self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(self.inputs, inputs):
            if own is not None:
                own.copy_(x)
        results = self.function(*self.inputs)
        for own, x in zip(*map(tree_leaves, (self.results, results))):
            if own is not None:
                own.copy_(x)
        return self.results


def loss_and_gradients(model, idx):
    loss = model.states(idx).square().sum()
    return [loss, *torch.autograd.grad(loss, [p for name, p in model.named_parameters() if not name.startswith(('norm', 'decode'))])]


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU'))])
@pytest.mark.parametrize('values', [dict(n_head=0), dict(n_layer=2, eos_id=59, bptt_len=10)], ids=str)
def test_graphs_of_segments_give_what_the_steps_do(values, device, monkeypatch):
    """Two models of one shape share the graphs, the forward of one between forward and backward of the other."""
    models = [make(**values)[0].float().to(device) for _ in range(2)]
    for p in models[1].parameters():
        p.data *= 0.8
    idx = make()[1].to(device)
    monkeypatch.setattr(scan, 'GRAPHS', False)
    monkeypatch.setattr(scan, 'COMPILE', False)
    want = [loss_and_gradients(model, idx) for model in models]
    if device == 'cpu':
        monkeypatch.setattr(scan, 'Graph', Rerun)
        monkeypatch.setattr(scan, 'uses_graphs', lambda x: True)
    monkeypatch.setattr(scan, 'GRAPHS', True)
    for name in ('_graphs', '_graph_weights'):
        monkeypatch.setattr(scan, name, {})
    with torch.inference_mode():
        models[0].states(idx)
    assert not scan._graphs  # whose shapes are many
    before = models[0].states(idx).square().sum()
    for _ in range(2):
        for model, expected in zip(models, want):
            for got, tensor in zip(loss_and_gradients(model, idx), expected):
                torch.testing.assert_close(got, tensor, rtol=1e-4, atol=1e-5 * tensor.abs().max().item())
    assert not any(x.requires_grad for w in scan._graph_weights.values() for x in w.tensors())
    before.backward()
    torch.testing.assert_close(models[0].fuse.weight.grad, want[0][1 + [n for n, _ in models[0].named_parameters()].index('fuse.weight')],
                               rtol=1e-4, atol=1e-4)
