"""The bounds that bench.gpn prints: the arithmetic by hand at the paper's shape, and what is counted on the code."""
import pytest
import torch

from bench import gpn as bench
from model_gpn import Config, Model

scan = bench.scan


def test_bounds_at_the_papers_shape_are_those_worked_out_by_hand():
    forward, backward = bench.bounds(scan.Sizes(2496, 6656, 15, 128, 256, 1), 128)
    product_in = 2496 + (1920 + 1920 + 3840 + 15 + 15) + (6656 + 3840 + 6656)  # gate | q k v beta decay | GLU
    assert product_in == 27358
    n_weights = 2496 * 2496 + 2496 * 27358 + (6656 + 3840) * 2496
    assert n_weights == 100_713_600
    memory = 128 * 15 * 128 * 256 * 4
    assert memory == 251_658_240
    room = 132 * 483 * 1024 - 128 * 27358 * 4  # 65.3 MB less 14.0 MB of sums: not even M fits, so no weight stays
    assert (forward['weights_mb'], forward['memory_mb'], forward['room_mb']) == (201.4, 251.7, 51.3)
    assert forward['moved_us'] == pytest.approx((2 * n_weights + 2 * memory) / 3.35e6, abs=0.1) == 210.4
    assert backward['moved_us'] == pytest.approx((2 * n_weights + 4 * memory) / 3.35e6, abs=0.1)
    assert forward['tensor_us'] == pytest.approx(2 * 128 * n_weights / 989e6, abs=0.1) == 26.1
    assert forward['now_us'] == pytest.approx(210.4 + 8 * 1.3, abs=0.1)
    assert forward['persistent_us'] == pytest.approx(210.4 - 2 * room / 3.35e6 + 4, abs=0.1)
    assert forward['gain'] == 1.2 and backward['gain'] == 1.13
    assert forward['gain_half'] == round((210.36 + 10.4) / (210.36 - room / 3.35e6 + 4), 2)


def test_a_small_batch_keeps_its_memory_and_some_weights_on_the_chip():
    forward, _ = bench.bounds(scan.Sizes(2496, 6656, 15, 128, 256, 1), 1)
    memory, room = 15 * 128 * 256 * 4, 132 * 483 * 1024 - 27358 * 4
    moved = 201_427_200 - (room - memory)  # the weights that have no room
    assert forward['persistent_us'] == pytest.approx(moved / 3.35e6 + 4, abs=0.1)


@pytest.mark.parametrize('values', [{}, dict(n_layer=2, n_embd=1920, n_head=11), dict(n_head=0, n_layer=2)])
def test_the_weights_are_all_that_the_scan_multiplies_by(values):
    with torch.device('meta'):
        model = Model(Config(**values))
    matrices = [w for w in scan.fold(model)[:2 + 3 * model.config.n_layer] if w.dim() == 2]
    forward, _ = bench.bounds(scan.Sizes.of(model.config), 2)
    assert forward['weights_mb'] == round(2 * sum(w.numel() for w in matrices) / 1e6, 1) > 100
