"""Figure 5 of the SPS paper against its definitions: parameter copies and dense masks."""
import copy
import random

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, run, succeeded, train_tiny
from test_sps import interleaved_logits, make

from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.writing import write_data
from lm_architectures.files import UserError
from papers.models import long_documents, smoothed
from papers.sps import gradient_flow, restricted_state

IDS = torch.randint(0, 59, (15,), generator=torch.Generator().manual_seed(3))  # one document
T = len(IDS) - 1
GROUPED = dict(n_kv_head=1, head_size=6, qkv_bias=True, qk_norm=True)
MODELS = {
    'standard': ('standard', {}),
    'standard, biases, norms of heads, window': ('standard', GROUPED | dict(window=4)),
    'nextlat': ('nextlat', {}),
    'sps': ('sps', dict(window=3)),
    'sps, grouped queries': ('sps', GROUPED | dict(window=2)),
    'sps, beyond the paper': ('sps', dict(window=3, predict_layers=2, predict_input='token')),
    'sps, fork': ('sps', dict(window=3, predict_input='state', predict_layers=2)),
    'two_x_memory': ('sps', dict(method='two_x_memory', window=None)),
    'delayed_state': ('sps', dict(method='delayed_state', window=3)),
    'reverse_sps': ('sps', dict(method='reverse_sps', window=3)),
}


def exact(name='sps', **values):
    """Return a small float64 model with random gains and biases instead of ones and zeros."""
    model = make(name, **values).double()
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.2 * torch.randn_like(p)
    return model


def losses(model, ids):
    """Return the loss at each position (T,)."""
    return F.cross_entropy(model.final_hidden(ids[None, :-1])[0] @ model.head.weight.T, ids[1:], reduction='none')


def gradients_of_a_copy(model, ids, stream, position, steps):
    """Return [{parameter: gradient}] of the losses at `steps` for one position of a stream.

    Copies of the parameters compute that position, from a copy of its embedding or <predict>.
    """
    model = copy.deepcopy(model)
    own, added = {}, torch.zeros(model.config.n_embd, dtype=torch.float64, requires_grad=True)
    last = {*model.blocks[-1].modules()} if getattr(model, 'output', (0,)) == (1,) else ()

    def with_own(x, mine, shared, first):
        """Use `mine` at the position, `shared` elsewhere. x: both streams, or only `first`."""
        at = position + T * (stream - first)
        is_own = torch.arange(x.shape[1]) == (at if at >= 0 else x.shape[1])
        return torch.where(is_own.view(-1, *[1] * (x.dim() - 2)), mine, shared)
    for name, layer in model.named_modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.RMSNorm)) and name not in ('norm', 'head'):
            mine, shared = copy.deepcopy(layer), layer.forward
            layer.forward = lambda x, mine=mine, shared=shared, layer=layer: with_own(
                x, mine(x), shared(x), int(layer in last and x.shape[1] == T))
            own |= {f'{name}.{part}': p for part, p in mine.named_parameters()}
    if stream == 0:
        model.embed.register_forward_hook(  # not for the one id of <predict>
            lambda layer, args, y: with_own(y, y + added, y, 0) if args[0].numel() > 1 else y)
    else:
        model.blocks[model.n_x_layers].register_forward_pre_hook(
            lambda layer, args: (with_own(args[0], args[0] + added, args[0], 0), *args[1:]))
    found = losses(model, ids)
    own['input'] = added
    return [{name: g for name, g in zip(own, torch.autograd.grad(
        found[step], list(own.values()), retain_graph=True, allow_unused=True)) if g is not None} for step in steps]


def norms_with_copies(model, ids, positions, steps):
    """Return gradient norms (losses, S, P) for parameter copies per position and stream."""
    return torch.tensor([[[sum(g.square().sum() for g in gradients.values()) for gradients in gradients_of_a_copy(
        model, ids, stream, p, steps)] for p in positions] for stream in range(1 + hasattr(model.config, 'method'))],
        dtype=torch.float64).sqrt().permute(2, 0, 1)


@pytest.mark.parametrize('name', MODELS)
def test_gradient_norms_equal_those_of_a_parameter_copy_per_position(name):
    file, values = MODELS[name]
    model = exact(file, eos_id=None, **values)
    positions, steps = torch.tensor([0, 4, 5, 11]), torch.tensor([11, 13])
    got = gradient_flow.gradient_norms(model, IDS, positions, steps)
    want = norms_with_copies(model, IDS, positions.tolist(), steps)
    assert got.dtype == torch.float64 and (want > 0).sum() >= len(want) * 4 - 4
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-14)
    # the gradients of all copies add up to those of the parameters
    total = {}
    for stream in range(got.shape[1]):
        for p in range(T):
            for part, g in gradients_of_a_copy(model, IDS, stream, p, steps[1:])[0].items():
                total[part] = total.get(part, 0) + g
    model.zero_grad()
    losses(model, IDS)[13].backward()
    for part, p in model.named_parameters():
        if part not in ('embed.weight', 'norm.weight', 'norm.bias', 'head.weight') and p.grad is not None:
            assert torch.allclose(total[part], p.grad, rtol=1e-6, atol=1e-12), part


def test_ratios_are_taken_per_example_and_then_averaged():
    model = exact(method='sps', window=3, eos_id=None)
    s = gradient_flow.Settings(positions=2, max_k=4, block_size=48, batch_size=3)
    assert gradient_flow.shortest_document(gradient_flow.Settings(max_k=512)) == 585
    documents, rng, examples = [IDS.numpy(), IDS.flip(0).numpy()[:12]], random.Random(0), []
    for document in documents:
        for p in gradient_flow.draw_positions(len(document), s, rng):
            assert 3 <= p and p + s.max_k + 1 < len(document)
            ids = F.pad(torch.tensor(document), (0, len(IDS) - len(document)))
            norms = norms_with_copies(model, ids, [p], range(p, p + s.max_k + 1))[..., 0]
            examples.append((norms / norms[:1]).T)
    assert torch.allclose(gradient_flow.mean_ratios(model, documents, s), torch.stack(examples).mean(0), rtol=1e-6)


def test_unsupported_models_give_a_clear_error():
    for model in (make('context_ready', K=2, block='llama'), make('gpn', n_head=0)):
        with pytest.raises(UserError, match='expected a run of standard, sps or nextlat'):
            gradient_flow.gradient_norms(model, IDS, torch.tensor([2]), torch.tensor([3]))
    for model, sentence in ((make('nextlat'), 'without a window'), (make('standard', window=3), 'window = 3')):
        with pytest.raises(UserError, match=sentence):
            restricted_state.restricted(model, 3)


@pytest.mark.parametrize('method', ['sps', 'two_x_memory', 'delayed_state', 'reverse_sps'])
def test_extra_nll_equals_that_of_a_pairwise_mask(method):
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
    assert changed.tolist() == [False] * 5 + [True] * 9  # positions 0 ... omega see everything


def test_a_standard_transformer_is_restricted_by_its_window():
    narrow, cut = make('standard', eos_id=None, window=2), restricted_state.restricted(make('standard'), 2)
    cut, narrow = (restricted_state.nll_by_position(m, IDS[None], restricted_state.Settings()) for m in (cut, narrow))
    assert torch.equal(cut, narrow)


def test_long_documents_are_whole_validation_documents(tmp_path, capsys):
    texts = [('val', letter * n) for letter, n in zip('abcdef', (5, 30, 9, 20, 40, 9))] + [('train', 'x' * 50)]
    write_data(tmp_path / 'data', load_tokenizer('byte'), texts, shard_tokens=36)
    data = open_data(str(tmp_path / 'data'))
    want = [np.array([ord('b')] * 30 + [256])[:25], np.array([ord('d')] * 20 + [256])]
    assert all(np.array_equal(a, b) for a, b in zip(long_documents(data, 21, 25, 2), want, strict=True))
    drawn = {tuple(map(len, long_documents(data, 5, 50, 5, seed))) for seed in (0, 0, 1, 2)}
    assert len(drawn) == 3 and all(set(lengths) <= {6, 31, 10, 21, 41} for lengths in drawn)
    assert len(long_documents(data, 21, 25, 9)) == 3 and '3 validation documents' in capsys.readouterr().err
    with pytest.raises(UserError, match='no validation document of 42 tokens or more'):
        long_documents(data, 42, 50, 1)


def test_trends_are_quadratic_and_end_where_the_gradient_is_zero():
    assert np.allclose(smoothed(np.arange(8.0) ** 2, 21), np.arange(8.0) ** 2) and list(smoothed([1, 2], 21)) == [1, 2]
    falling = [10.0 ** -k for k in range(30)]
    *trend, a, b = gradient_flow.log_trend(falling + [0.0] * 2)
    assert trend == pytest.approx(falling) and a is b is None


@pytest.fixture(scope='module')
def tiny_runs(tmp_path_factory, tiny_data):
    folder = tmp_path_factory.mktemp('runs')
    for name, *options in (('standard', '--model=standard'), ('sps', '--model=sps', '--window=4'),
                           ('reverse', '--model=sps', '--method=reverse_sps', '--window=4')):
        succeeded(train_tiny(tiny_data, folder / name, *options, '--eval_tokens=64', steps=1))
    return [folder / name for name in ('standard', 'sps', 'reverse')]


@pytest.mark.slow
def test_figure_5a_of_tiny_runs(tiny_runs, tmp_path):
    result = succeeded(run('-m', 'papers.sps.gradient_flow', *tiny_runs, f'--out={tmp_path}/a', '--n_documents=3',
                           '--positions=2', '--device=cpu'))
    assert 'the first 32 tokens of each document, k up to 16, positions from 2 on' in result.stdout
    assert 'reverse: the loss of a step does not depend on its own rho' in result.stdout
    lines = pd.read_csv(tmp_path / 'a.csv')[['label', 'stream']].drop_duplicates().to_numpy().tolist()
    sps, reverse = 'sps, method=sps', 'sps, method=reverse_sps'
    assert lines == [['standard', 'x'], [sps, 'x'], [sps, 'rho'], [reverse, 'x']]
    too_far = run('-m', 'papers.sps.gradient_flow', tiny_runs[0], '--max_k=30')
    assert_sentence(too_far, 'block_size is 32', 'Lower max_k')


@pytest.mark.slow
def test_figure_5b_of_tiny_runs(tiny_runs, tmp_path):
    result = succeeded(run('-m', 'papers.sps.restricted_state', *tiny_runs, f'--out={tmp_path}/b', '--omega=6',
                           '--n_documents=5', '--batch_size=2', '--device=cpu'))
    rows = pd.read_csv(tmp_path / 'b.csv')
    # positions count from 1, and 1 to 7 see everything
    assert [*rows.position] == [*range(8, 33)] * 3
    assert rows.extra_nll.to_numpy() == pytest.approx((rows.restricted_nll - rows.nll).to_numpy())
    extra = rows.groupby('label').extra_nll.mean()
    ratio = extra['standard'] / extra['sps, method=sps']
    assert [line.split()[-2:-1] for line in result.stdout.splitlines() if 'method=sps' in line][-1] == [f'{ratio:.5g}']
