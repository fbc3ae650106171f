"""papers/nextlat/manhattan.py on a perfect guide through a city, and on a run."""
from functools import reduce

import numpy as np
import pytest
import torch
from conftest import run, succeeded
from test_tasks import TRAIN, Guide

from lm_architectures.data import open_data
from lm_architectures.run import models
from papers.nextlat import manhattan


@pytest.fixture(scope='module')
def grid():
    d = open_data('manhattan:grid=6,steps=30,length=64,val_rows=8')
    return d.task, Guide(d)


def test_a_perfect_guide_recovers_from_detours(grid):
    task, guide = grid
    pairs = task.held_out_pairs
    straight, around = (manhattan.paths_with_detours(guide, task, pairs, share, np.random.default_rng(0))
                        for share in (0, 0.75))
    assert [len(way) for way in straight] == [guide.distance[goal, start] + 1 for start, goal in pairs]
    assert all(task.is_valid(*pair, way) for ways in (straight, around) for pair, way in zip(pairs, ways))
    assert sum(len(way) for way in around) > 1.3 * sum(len(way) for way in straight)


def test_compression_is_1_if_only_position_and_goal_matter(grid, monkeypatch):
    task, guide = grid
    prefixes = manhattan.pairs_of_walks(task, 10, np.random.default_rng(0))
    measured = lambda: [share(guide, task, prefixes, 64) for share in (manhattan.same_paths, manhattan.compression)]
    assert measured() == [1, 1]
    monkeypatch.setattr(guide, 'next', lambda walk: task.end if walk[2:3] == [0] else Guide.next(guide, walk))
    same_way, compression = measured()
    assert same_way == compression and 0.2 < compression < 0.9  # the first turn matters, too
    monkeypatch.setattr(manhattan, 'possible', lambda model, prefixes, *_: torch.arange(len(prefixes)) % 30 > 0)
    assert manhattan.compression(guide, task, prefixes, 60) == 0  # all continuations of a pair must be possible
    start, goal, *turns = manhattan.prefixes_to(task, 7, 9, 12, np.random.default_rng(0))
    assert goal == task.first_node + 9 and len(turns) == 12
    assert reduce(lambda node, turn: task.neighbor[node, turn], turns, start - task.first_node) == 7


def test_continuations_are_sampled_and_checked_token_by_token():
    torch.manual_seed(0)
    model = models.model_file('standard').Model(models.make_config('standard', dict(
        n_layer=2, n_head=2, n_embd=32, init_std=0.4, vocab_size=64, n_ids=40, eos_id=39))).eval()
    first, second = [[5, 6, 7], [1, 2, 3, 4]], [[7, 6, 5], [4, 3, 2, 1]]
    texts = manhattan.continuations(model, first * 200, 6, 39, torch.Generator().manual_seed(0))
    possible = manhattan.possible(model, second * 200, texts)
    assert manhattan.possible(model, first * 200, texts).all()
    n_ended = 0
    for row, (own, is_possible) in enumerate(zip(texts, possible)):
        assert len(own) == 6 or own[-1] == 39
        n_ended += len(own) < 6
        for prefix, expected in ((first[row % 2], True), (second[row % 2], bool(is_possible))):
            probs = model.logits(torch.tensor([prefix + own])).softmax(-1)[0, len(prefix) - 1:-1]
            assert all(p[token] > 0.01 for p, token in zip(probs, own)) == expected
    assert 10 < n_ended < 390 and 10 < possible.sum() < 390
    probs = model.logits(torch.tensor([first[0]]))[0, -1].softmax(-1)
    probs = probs.where(probs > 0.01, 0)
    drawn = torch.bincount(torch.tensor([own[0] for own in texts[::2]]), minlength=64) / 200
    assert (drawn - probs / probs.sum()).abs().max() < 0.12


def test_effective_rank_is_the_exponential_of_the_entropy_of_the_singular_values():
    directions = torch.linalg.qr(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))[0].T[:3]
    for sizes, want in ((torch.ones(3), 3), (torch.tensor([1, 2, 5.]), 8 / (2 ** 2 * 5 ** 5) ** (1 / 8))):
        assert manhattan.effective_rank(sizes[:, None] * directions) == pytest.approx(want, abs=1e-4)


@pytest.mark.slow
def test_a_manhattan_run_is_scored(tmp_path):
    out = tmp_path / 'city'
    result = succeeded(run(*TRAIN, '--data=manhattan:grid=4,steps=6,length=32,pairs=5,val_rows=5', '--block_size=32',
                           f'--max_tokens={4 * 8 * 32}', f'--out_dir={out}', '--sample_tokens=0'))
    assert 'next_token' in result.stdout
    scored = succeeded(run('-m', 'papers.nextlat.manhattan', out, f'--out={tmp_path / "city"}', '--n_prefixes=3'))
    assert ' rank ' in scored.stdout
    assert (tmp_path / 'city.csv').read_text().startswith('run,detours,')
