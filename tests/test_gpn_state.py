"""The analysis of a GPN's state: each measure on something whose answer is known."""
import math

import pytest
import torch
from test_gpn import make

from analysis import gpn_state


def test_geometry_of_known_states():
    torch.manual_seed(0)
    x = torch.randn(4000, 6) * torch.tensor([1.0, 1, 1, 1, 2, 0]) + torch.tensor([3.0, 0, 0, 4, 0, 0])
    numbers, deviation, share = gpn_state.geometry(x)
    assert numbers['mean magnitude'] == pytest.approx(5, abs=0.1) and numbers['dead dimensions'] == 1
    assert numbers['stable rank'] == pytest.approx(2, rel=0.1)  # (4 + 4) / 4
    assert numbers['participation ratio'] == pytest.approx(8 ** 2 / (4 + 16), rel=0.1)
    assert (numbers['components 90%'], numbers['components 99%']) == (5, 5) and share[-1] == pytest.approx(1)
    assert numbers['correlation mean'] < 0.05 and deviation.tolist() == sorted(deviation.tolist())


def test_retention_half_lives_and_pools():
    lags, lives = [1, 2, 4, 8, 16, 32, 64], [1.5, 3, 40]
    log_decay = torch.tensor([-1 / life for life in lives]).expand(2, 100, 3)
    curves = gpn_state.retention(log_decay, lags)
    assert torch.allclose(curves[2], torch.tensor([math.exp(-k / 40) for k in lags], dtype=torch.float64))
    got = [gpn_state.half_life(curve, lags) for curve in curves]
    assert got == pytest.approx(lives, rel=0.15) and gpn_state.pools(got) == ([0, 1], [2])
    assert gpn_state.half_life(torch.ones(7), lags) == math.inf


def test_rank_correlation_is_spearmans():
    assert gpn_state.rank_correlation(torch.tensor([1.0, 5, 3]), torch.tensor([10.0, 1000, 11])) == pytest.approx(1)
    assert gpn_state.rank_correlation(torch.tensor([1.0, 2, 2, 4]), torch.tensor([4.0, 3, 3, 0])) == pytest.approx(-1)


@pytest.mark.parametrize('values', [dict(eos_id=59), dict(n_head=0), dict(n_layer=2)])
def test_all_measures_of_a_small_model(values, tmp_path):
    model, idx = make(**values)
    states, _ = gpn_state.walk(model, idx)
    assert torch.allclose(states, model.states(idx))
    batches = [(idx, idx.roll(-1, 1)), (idx.flip(0), idx.flip(0).roll(-1, 1))]
    rows = gpn_state.measure(model, batches, torch.arange(64), str)
    parts = {part for part, *_ in rows}
    assert {'geometry', 'mean direction', 'running mean', 'cosine',
            'perplexity'} <= parts and ('half-life' in parts) == bool(model.config.n_head)
    ppl = {name: v for part, name, _, v in rows if part == 'perplexity'}
    assert ppl['as it is'] == pytest.approx(math.exp(sum(model(*batch)['nll'].item() for batch in batches) / 2))
    assert len(set(ppl.values())) == len(ppl)
    gpn_state.plot(rows, tmp_path / 'x.png')
    assert (tmp_path / 'x.png').read_bytes()[:4] == b'\x89PNG'
