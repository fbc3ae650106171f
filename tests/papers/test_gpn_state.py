"""The analysis of GPN states: each measure on data with a known result."""
import math

import pandas as pd
import pytest
import torch
from conftest import run, succeeded
from test_gpn import make

from papers.gpn import state


def test_geometry_of_known_states():
    torch.manual_seed(0)
    x = torch.randn(4000, 6) * torch.tensor([1.0, 1, 1, 1, 2, 0]) + torch.tensor([3.0, 0, 0, 4, 0, 0])
    numbers = {name: value for _, name, value in state.geometry(x)}
    deviation, share, pairs = (numbers.pop(name) for name in ('sorted', 'share', 'share of pairs'))
    assert numbers['mean magnitude'] == pytest.approx(5, abs=0.1) and numbers['dead dimensions'] == 1
    assert numbers['stable rank'] == pytest.approx(2, rel=0.1)  # (4 + 4) / 4
    assert numbers['participation ratio'] == pytest.approx(8 ** 2 / (4 + 16), rel=0.1)
    assert (numbers['components 90%'], numbers['components 99%']) == (5, 5) and share[6] == pytest.approx(1)
    assert numbers['correlation mean'] < 0.05 and [*deviation.values()] == sorted(deviation.values())
    assert sum(pairs.values()) == pytest.approx(1) and sum(pairs[x] for x in pairs if abs(x) > 0.1) == 0
    # the mean, along (3, 4), has the largest mean square; the fifth dimension the largest variance
    assert numbers['cosine of the mean with the first component'] > 0.99
    assert numbers['cosine of the mean with the first component of centered states'] < 0.1


def test_retention_lifetimes_and_pools_of_known_decays():
    lags, lives = [1, 2, 4, 8, 16, 32, 64], [1.5, 3, 40]
    log_decay = torch.tensor([-1 / life for life in lives]).expand(2, 100, 3)
    curves = state.retention(log_decay, lags)
    assert torch.allclose(curves[2], torch.tensor([math.exp(-k / 40) for k in lags], dtype=torch.float64))
    got = [state.lifetime(curve, lags) for curve in curves]
    assert got == pytest.approx(lives) and state.pools(got) == ([0, 1], [2])
    assert state.pools([math.inf, 2, math.inf]) == ([1], [0, 2])
    assert state.pools([math.inf, math.inf]) == ([], [0, 1])  # no gap, as in gpn_no_decay
    assert state.lifetime(torch.ones(7), lags) == math.inf
    assert state.lifetime(torch.tensor([math.exp(-4), 0]), [1, 2]) == pytest.approx(1 / 4)


def test_cosines_over_lags_equal_a_loop_over_pairs():
    torch.manual_seed(0)
    states = torch.randn(2, 8, 5).double()
    raw, centered = state.cosines(states, [1, 3])
    for i, k in enumerate((1, 3)):
        for found, rows in ((raw, states), (centered, [x - x.mean(0) for x in states])):
            pairs = [torch.cosine_similarity(x[t], x[t + k], 0) for x in rows for t in range(8 - k)]
            assert torch.allclose(found[i], torch.stack(pairs).mean())


@pytest.mark.parametrize('values', [dict(n_head=0), dict(n_layer=2), dict(decoder_bias=True)])
def test_all_measures_of_a_small_model(values):
    model, idx = make(eos_id=None, **values)
    states, _ = state.unroll(model, idx)
    assert torch.allclose(states, model.states(idx))
    batches = [(idx, idx.roll(-1, 1)), (idx.flip(0), idx.flip(0).roll(-1, 1))]
    rows = state.measure(model, batches, torch.arange(64), str)
    found = {part: dict(zip(own['name'] + own.x.map(str), own.value)) for part, own in rows.groupby('part')}
    assert ('lifetime' in found) == bool(model.config.n_head)
    assert ('decoder bias' in found) == model.config.decoder_bias
    T = idx.shape[1]
    both = torch.cat([states, model.states(idx.flip(0)).detach()])
    assert found['running mean'][f'cosine with the mean{T}'] == pytest.approx(
        float(torch.cosine_similarity(both.mean(1), both.mean((0, 1)), dim=-1).mean()))
    assert (rows[rows.part.isin(('cosine', 'retention'))].x < T).all()
    assert sum(found['correlation'].values()) == pytest.approx(1)
    ppl = found['perplexity']
    assert ppl['unchanged'] == pytest.approx(math.exp(sum(model(*batch)['nll'].item() for batch in batches) / 2))
    assert len(set(ppl.values())) == len(ppl)
    plotted = state.plot(rows)
    axes = {ax.get_ylabel() or ax.get_xlabel(): ax for ax in plotted.axes}
    assert [bar.get_width() for bar in axes['validation perplexity'].patches] == [*ppl.values()]
    assert len(axes['cosine of states k apart'].lines) == 2


def test_the_mean_direction_is_decoded_without_the_decoders_bias():
    model, idx = make(decoder_bias=True, eos_id=None)
    torch.nn.init.normal_(model.decode.bias, std=100)
    batches = [(idx, idx.roll(-1, 1))]
    def mean_direction():
        rows = state.measure(model, batches, torch.arange(64), str)
        return [*rows[rows.part == 'mean direction'].value]
    *biased, shared = mean_direction()
    assert 0 <= shared < 10  # a random bias predicts other tokens than the mean
    torch.nn.init.zeros_(model.decode.bias)
    assert biased == mean_direction()[:-1]


def test_heads_that_are_off_are_not_read():
    model, idx = make(eos_id=None)
    batches = [(idx, idx.roll(-1, 1))]
    nats, _ = state.evaluate(model, batches, heads_off=[*range(model.config.n_head)])
    with torch.no_grad():
        for layer in model.layers:
            layer.read_out.weight.zero_()  # the memory is not read
    assert torch.allclose(nats, state.evaluate(model, batches)[0])


def test_an_edited_model_is_analyzed_with_its_edit(tmp_path, tiny_data):
    sizes = '--n_layer=1', '--n_head=2', '--n_embd=16', '--d_emb=8', '--d_k=4', '--d_v=8', '--scan=loop'
    succeeded(run('train.py', '--model=gpn_no_decay', f'--data={tiny_data}', *sizes, '--mask_documents=False',
                  '--block_size=16', '--batch_size=2', '--max_tokens=32', '--warmup_tokens=0', '--dtype=float32',
                  '--sample_tokens=0', '--eval_tokens=64', f'--out_dir={tmp_path / "run"}'))
    said = succeeded(run('-m', 'papers.gpn.state', tmp_path / 'run', f'--out={tmp_path / "x"}', '--device=cpu',
                         '--unigram_tokens=1000', '--batches=2', '--batch_size=8')).stdout
    rows = pd.read_csv(tmp_path / 'x.csv').set_index('part')
    unchanged, *_, slow = rows.loc['perplexity'].itertuples()
    perplexity = float(unchanged.value)
    assert f'perplexity unchanged {perplexity:.5g}' in ' '.join(said.split())
    assert rows.loc['lifetime'].value.eq('inf').all() and (tmp_path / 'x.png').exists()
    assert slow.name.startswith('slow heads')
