"""Figure 5 of the SPS paper against its definitions: a copy of the parameters for each position, and dense masks."""
import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, plain_rotation, run, succeeded, train_tiny
from scipy.signal import savgol_filter
from test_models import small_model
from test_sps import interleaved_logits, make, sees

import model_context_ready
import model_nextlat
import model_sps
import model_standard
from analysis import gradient_flow, restricted_state
from analysis.documents import long_documents
from analysis.figures import read_csv, smoothed
from attn_kernels import rope_table
from common.files import UserError
from data import open_data
from data.tokenizers import load_tokenizer
from data.writing import write_data

IDS = torch.randint(0, 59, (15,), generator=torch.Generator().manual_seed(3))  # one document
T = len(IDS) - 1
GROUPED = dict(n_kv_head=1, head_size=6, qkv_bias=True, qk_norm=True)
BEYOND = dict(predict_layers=2, predict_input='token')
MODELS = {
    'standard': (model_standard, {}),
    'standard, biases, norms of heads, window': (model_standard, GROUPED | dict(window=4)),
    'nextlat': (model_nextlat, {}),
    'sps': (model_sps, dict(window=3)),
    'sps, grouped queries': (model_sps, GROUPED | dict(window=2)),
    'sps, beyond the paper': (model_sps, BEYOND | dict(window=3)),
    'sps, fork': (model_sps, dict(window=3, predict_input='state', predict_layers=2)),
    'delayed_state, fork': (model_sps, dict(method='delayed_state', window=3, predict_input='state', predict_layers=1)),
    'sps, top layer': (model_sps, dict(window=0, predict_layers=1)),
    'two_x_memory': (model_sps, dict(method='two_x_memory', window=None)),
    'delayed_state': (model_sps, dict(method='delayed_state', window=3)),
    'reverse_sps': (model_sps, dict(method='reverse_sps', window=3)),
    'reverse_sps, beyond the paper': (model_sps, BEYOND | dict(method='reverse_sps', window=3)),
}


def exact(module=model_sps, **values):
    """A small model in float64 whose gains and biases are none of 1 and 0."""
    model = make(module, **values).double()
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.2 * torch.randn_like(p)
    return model


def losses_with_copies(model, ids):
    """The loss at each position (T,), and [(stream, leaf (T, ...))]: each position of each stream has its own weights.

    Written out slowly, all layers in full, in float64.
    """
    c, x = model.config, model.embed.weight[ids[:-1]].detach().requires_grad_()
    leaves, h = [(0, x)], x[None]
    names = ['x', 'rho'] if hasattr(c, 'method') else ['x']
    if len(names) == 2:
        predict = model.embed.weight[c.n_ids].detach().expand_as(x).clone().requires_grad_()
        leaves.append((1, predict))
        h = torch.stack([x, predict + x if c.predict_input == 'token' else predict])
    cos, sin = (table[..., c.head_size // 2:] for table in rope_table(torch.arange(T), c.head_size, c.rope_theta))

    def own(parameter):  # (S, T, shape)
        copies = [parameter.detach().expand(T, *parameter.shape).clone().requires_grad_() for _ in names]
        leaves.extend(enumerate(copies))
        return torch.stack(copies)

    def linear(layer, h):
        y = torch.einsum('stoi,sti->sto', own(layer.weight), h)
        return y if layer.bias is None else y + own(layer.bias)

    def norm(layer, h):
        weight = own(layer.weight)
        weight = weight if h.dim() == 3 else weight.unsqueeze(2)  # one for all heads
        return h / (h.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def is_seen(i, asks, k, read):
        if len(names) == 2:
            return sees(c, (i, asks), (k, read), [0] * T)
        return k <= i and (getattr(c, 'window', None) is None or k >= i - c.window)

    H, HK, D = c.n_head, c.n_kv_head, c.head_size
    for number, block in enumerate(model.blocks):
        alone = number < getattr(model, 'n_x_layers', 0)  # rho waits, unseen
        if len(names) == 2 and c.predict_input == 'state' and number == model.n_x_layers:
            h = torch.stack([h[0], h[0] + predict])
        seen = torch.tensor([[is_seen(i, asks, k, read) and not (alone and read == 'rho')
                              for read in names for k in range(T)] for asks in names for i in range(T)])
        q, k, v = linear(block.qkv, norm(block.attn_norm, h)).split([H * D, HK * D, HK * D], -1)
        q, k, v = (each.unflatten(-1, (-1, D)) for each in (q, k, v))
        if c.qk_norm:
            q, k = norm(block.q_norm, q), norm(block.k_norm, k)
        q, k = plain_rotation(q, cos, sin), plain_rotation(k, cos, sin)
        k, v = (each.repeat_interleave(H // HK, 2).flatten(0, 1) for each in (k, v))
        scores = torch.einsum('qhd,khd->hqk', q.flatten(0, 1), k) / math.sqrt(D)
        p = scores.masked_fill(~seen, -1e30).softmax(-1)
        after = h + linear(block.attn_out, torch.einsum('hqk,khd->qhd', p, v).flatten(1).unflatten(0, (-1, T)))
        gate, up = linear(block.gate_up, norm(block.ffn_norm, after)).chunk(2, -1)
        after = after + linear(block.ffn_out, F.silu(gate) * up)
        h = torch.stack([after[0], h[1]]) if alone else after
    emitted = h[1 if getattr(model, 'output', (0,)) == (1,) else 0]
    emitted = emitted / (emitted.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * model.norm.weight.detach()
    return F.cross_entropy(emitted @ model.head.weight.detach().T, ids[1:], reduction='none'), leaves


def norms_with_copies(model, ids):
    """Norms (T losses, S, T positions) of the gradients with respect to the copies."""
    losses, leaves = losses_with_copies(model, ids)
    squares = torch.zeros(T, 1 + max(stream for stream, _ in leaves), T, dtype=torch.float64)
    for j, loss in enumerate(losses):
        gradients = torch.autograd.grad(loss, [leaf for _, leaf in leaves], retain_graph=True, allow_unused=True)
        for (stream, _), gradient in zip(leaves, gradients):
            if gradient is not None:
                squares[j, stream] += gradient.square().flatten(1).sum(1)
    return squares.sqrt()


@pytest.mark.parametrize('name', MODELS)
def test_gradient_norms_are_those_of_a_copy_of_the_parameters_for_each_position_and_stream(name):
    module, values = MODELS[name]
    model = exact(module, eos_id=None, **values)
    want = norms_with_copies(model, IDS)
    positions, steps = torch.tensor([0, 4, 5, 11]), torch.arange(11, T)
    got = gradient_flow.gradient_norms(model, IDS, positions, steps)
    want = want[steps][..., positions]
    assert got.dtype == torch.float64 and (want > 0).sum() >= len(want) * 4 - 4
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize('values', [dict(K=1), dict(K=1, variant='extra_ffn'), dict(K=3, eos_id=59),
                                    dict(K=3, variant='tied'), dict(K=2, block='llama')])
def test_weights_that_a_position_uses_in_several_unrolls_count_once(values):
    """Here the layers themselves compute one position with weights of its own."""
    model, p, steps = exact(model_context_ready, **values), 5, torch.tensor([5, 9, 13])
    got = gradient_flow.gradient_norms(model, IDS, torch.tensor([p]), steps)
    with_copy, copies, embedded = copy.deepcopy(model), [], []
    for name, layer in with_copy.named_modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm)) and name not in ('norm', 'head'):
            own, shared = copy.deepcopy(layer), layer.forward
            layer.forward = lambda x, own=own, shared=shared: torch.where(
                (torch.arange(x.shape[1]) == p)[:, None], own(x), shared(x))
            copies += own.parameters()
    with_copy.embed.register_forward_hook(lambda layer, args, y: embedded.append(y))
    log_p = with_copy.head(with_copy.head_input(with_copy.states(IDS[None, :-1])))[0].log_softmax(-1)
    for j, found in zip(steps, got[:, 0, 0]):
        *of_copies, of_embedding = torch.autograd.grad(-log_p[j, IDS[j + 1]], [*copies, *embedded], retain_graph=True)
        squares = sum(g.square().sum() for g in of_copies) + of_embedding[0, p].square().sum()
        assert found == pytest.approx(float(squares.sqrt()), rel=1e-6)


def test_ratios_are_taken_per_example_and_then_averaged():
    model = exact(method='sps', window=3, eos_id=None)
    s = gradient_flow.Settings(positions=2, max_k=4, block_size=48, batch_size=3)
    assert gradient_flow.shortest_document(gradient_flow.Settings(max_k=512)) == 585
    documents, rng, examples = [IDS.numpy(), IDS.flip(0).numpy()[:12]], random.Random(0), []
    for document in documents:
        norms = norms_with_copies(model, F.pad(torch.tensor(document), (0, len(IDS) - len(document))))
        for p in gradient_flow.draw_positions(len(document), s, rng):
            assert 3 <= p and p + s.max_k + 1 < len(document)
            examples.append(norms[p:p + s.max_k + 1, :, p].T / norms[p, :, p, None])
    assert torch.allclose(gradient_flow.mean_ratios(model, documents, s), torch.stack(examples).mean(0), rtol=1e-6)


def test_models_whose_question_makes_no_sense_are_a_sentence():
    odd = make(model_standard, eos_id=None)
    odd.blocks[0].scale = torch.nn.PReLU()
    for model, sentence in ((make(model_context_ready, K=2, bptt=True), 'context_ready without bptt'),
                            (small_model('gpn', dict(n_head=0, eos_id=None)), 'is a model_gpn: expected a run of'),
                            (odd, 'with linear layers, RMSNorm and LayerNorm only')):
        with pytest.raises(UserError, match=sentence):
            gradient_flow.gradient_norms(model, IDS, torch.tensor([2]), torch.tensor([3]))
    with pytest.raises(UserError, match='model_nextlat, whose state has no window'):
        restricted_state.restricted(make(model_nextlat, eos_id=None), 2)
    with pytest.raises(UserError, match='trained with window = 3'):
        restricted_state.restricted(make(model_standard, window=3, eos_id=None), 3)


@pytest.mark.parametrize('method', ['sps', 'two_x_memory', 'delayed_state', 'reverse_sps'])
def test_extra_nll_is_that_of_a_mask_built_pair_by_pair(method):
    model = make(method=method, window=None if method == 'two_x_memory' else 3, eos_id=None)
    model.config.pad_rows_in_loss = False
    windows, s = torch.stack([IDS, IDS.flip(0)]), restricted_state.Settings()
    dense, nll = copy.deepcopy(model).double(), {}
    for omega in (None, 4):
        dense.config.persistent_window = omega
        log_p = interleaved_logits(dense, windows[:, :-1])[..., :60].log_softmax(-1)
        nll[omega] = -log_p.gather(-1, windows[:, 1:, None])[..., 0].sum(0)
    assert torch.allclose(restricted_state.nll_by_position(model, windows, s), nll[None], atol=1e-5)
    cut = restricted_state.nll_by_position(restricted_state.restricted(model, 4), windows, s)
    assert torch.allclose(cut, nll[4], atol=1e-5)
    changed = (nll[4] - nll[None]).abs() > 1e-9
    assert changed.tolist() == [False] * 5 + [True] * 9  # positions 0 ... omega see all there is


def test_a_standard_transformer_is_restricted_by_its_window():
    model = make(model_standard, eos_id=None)
    narrow = make(model_standard, eos_id=None, window=2)
    want = restricted_state.nll_by_position(narrow, IDS[None], restricted_state.Settings())
    model = restricted_state.restricted(model, 2)
    assert torch.equal(restricted_state.nll_by_position(model, IDS[None], restricted_state.Settings()), want)


def test_long_documents_are_whole_validation_documents(tmp_path, monkeypatch, capsys):
    texts = [('val', letter * n) for letter, n in zip('abcdef', (5, 30, 9, 20, 40, 9))] + [('train', 'x' * 50)]
    write_data(tmp_path / 'data', load_tokenizer('byte'), texts, shard_tokens=36)
    data = open_data(str(tmp_path / 'data'))
    for piece in (3, 2 ** 20):  # documents that lie over several pieces, and over shards
        monkeypatch.setattr('analysis.documents.PIECE', piece)
        want = [np.array([ord('b')] * 30 + [256])[:25], np.array([ord('d')] * 20 + [256])]
        assert all(np.array_equal(a, b) for a, b in zip(long_documents(data, 21, 25, 2), want, strict=True))
    assert len(long_documents(data, 21, 25, 9)) == 3 and '3 validation documents' in capsys.readouterr().out
    with pytest.raises(UserError, match='no validation document of 42 tokens or more'):
        long_documents(data, 42, 50, 1)
    with pytest.raises(UserError, match='is a task'):
        long_documents(open_data('path_star:nodes=20'), 5, 5, 1)


def test_trends_are_savitzky_golays_and_end_where_no_path_leads():
    values = np.random.default_rng(0).normal(size=50)
    assert np.array_equal(smoothed(values, 21), savgol_filter(values, 21, 2))
    assert np.allclose(smoothed(np.arange(8.0) ** 2, 21), np.arange(8.0) ** 2) and list(smoothed([1, 2], 21)) == [1, 2]
    falling = [10.0 ** -k for k in range(30)]
    *trend, a, b, c = gradient_flow.log_trend(falling + [0.0] * 3)
    assert trend == pytest.approx(falling) and a == b == c == ''
    assert gradient_flow.log_trend([0.0, 1.0]) == ['', '']


@pytest.fixture(scope='module')
def tiny_runs(tmp_path_factory, tiny_data):
    folder = tmp_path_factory.mktemp('runs')
    for name, *options in (('standard', '--model=standard'), ('sps', '--model=sps', '--window=4'),
                           ('reverse', '--model=sps', '--method=reverse_sps', '--window=4')):
        succeeded(train_tiny(tiny_data, folder / name, *options, '--eval_tokens=64', steps=1))
    return [folder / name for name in ('standard', 'sps', 'reverse')]


@pytest.mark.slow
def test_figure_5a_of_tiny_runs(tiny_runs, tmp_path):
    result = succeeded(run('-m', 'analysis.gradient_flow', *tiny_runs, f'--out={tmp_path}/a', '--n_documents=3',
                           '--positions=2', '--device=cpu'))
    assert 'documents are read to 32\nk goes to 16, positions from 2' in result.stdout
    assert 'reverse_sps: the loss of a step does not reach its own rho' in result.stdout
    rows = read_csv(tmp_path / 'a.csv')
    lines = {(row['label'], row['stream']) for row in rows}
    assert lines == {('standard', 'x'), ('sps', 'x'), ('sps', 'rho'), ('reverse_sps', 'x')}
    assert [row['k'] for row in rows] == [str(k) for k in range(1, 17)] * 4
    s = gradient_flow.Settings(n_documents=3, positions=2, block_size=32, max_k=16, device='cpu')
    means, _ = gradient_flow.measure(tiny_runs[1], s)
    assert [float(row['ratio']) for row in rows[16:48]] == pytest.approx(means[:, 1:].flatten().tolist())
    assert {(row['documents'], row['positions'], row['max_k'], row['block_size']) for row in rows} == {
        ('3', '2', '16', '32')}
    assert (tmp_path / 'a.png').read_bytes()[:4] == b'\x89PNG'
    assert_sentence(run('-m', 'analysis.gradient_flow', tiny_runs[0], '--max_k=30'), 'block_size is 32', 'Lower max_k')


@pytest.mark.slow
def test_figure_5b_of_tiny_runs(tiny_runs, tmp_path):
    result = succeeded(run('-m', 'analysis.restricted_state', *tiny_runs, f'--out={tmp_path}/b', '--omega=6',
                           '--n_documents=5', '--batch_size=2', '--device=cpu'))
    rows = read_csv(tmp_path / 'b.csv')
    assert [row['position'] for row in rows] == [str(i) for i in range(8, 33)] * 3  # from 1; 1 to 7 lose nothing
    for row in rows:
        assert float(row['extra_nll']) == pytest.approx(float(row['restricted_nll']) - float(row['nll']))
    assert {row['documents'] for row in rows} == {'5'} and (tmp_path / 'b.png').read_bytes()[:4] == b'\x89PNG'
    standard, sps = (np.mean([float(row['extra_nll']) for row in rows if row['label'] == label])
                     for label in ('standard', 'sps'))
    assert f'standard loses {standard / sps:.2f} times as much as sps' in result.stdout
    assert_sentence(run('-m', 'analysis.restricted_state', *tiny_runs), 'omega is 64: expected at most 30')
