"""A5 and Manhattan through the scripts, and papers/nextlat/manhattan.py on a perfect guide."""
import csv
from functools import reduce

import numpy as np
import pytest
import torch
from conftest import eval_lines, run, succeeded
from test_tasks import TRAIN, Guide

from lm_architectures.data import open_data
from lm_architectures.run import models
from papers.nextlat import manhattan


@pytest.mark.slow
def test_a5_trains_on_short_words_and_is_evaluated_on_long_ones(tmp_path):
    out = tmp_path / 'a5'
    result = succeeded(run(*TRAIN, '--model=nextlat', '--lambda_kl=0', '--data=a5:length=4,val_rows=20',
                           '--block_size=4', '--mask_documents=False', f'--max_tokens={8 * 8 * 4}', f'--out_dir={out}'))
    assert 'a sample' in result.stdout
    succeeded(run('eval.py', out, '--val', '--data=a5:length=9,val_rows=20', '--dtype=float32'))
    scores = eval_lines(out)[-1]['results']['val']
    assert {'accuracy_9', 'rnn_accuracy_9'} <= scores.keys()
    drawn = succeeded(run('-m', 'analysis.a5', out, '--length=9', '--words=20', '--batch_size=7', '--device=cpu',
                          f'--out={tmp_path / "words"}'))
    assert 'p_psi as an RNN' in drawn.stdout
    found = {who + row['position']: float(row['mean']) for row in csv.DictReader(open(tmp_path / 'words.csv'))
             for who in ['rnn_accuracy_' if row['who'] else 'accuracy_']}
    assert found == {name: value for name, value in scores.items() if 'accuracy' in name}
    assert (tmp_path / 'words.png').exists()


# ---- papers.nextlat.manhattan ----

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


def test_the_map_invents_only_streets_that_walks_need(grid):
    task, _ = grid
    true = {(node, turn): after for node, exits in enumerate(task.exits) for turn, after in exits}
    positions = manhattan.layout(task)
    assert all(np.linalg.norm(positions[a] - positions[b]) == pytest.approx(1, abs=1e-3) for (a, _), b in true.items())
    near = [[b for b in range(36) if np.linalg.norm(positions[a] - positions[b]) <= 2] for a in range(36)]
    rng, walks = np.random.default_rng(0), []
    for _ in range(200):
        start, goal, *turns, _ = task._walk(rng)
        walks.append((start - task.first_node, goal - task.first_node, turns))
    used, n_failed = manhattan.rebuild(walks, true, near, 8)
    assert used.items() <= true.items() and len(used) > 50 and n_failed == 0
    east, north, *_ = (task.symbols.index(name) for name in 'ENSW')
    at = {name: task.nodes.index(name) for name in task.nodes}
    wrong = at['0_0'], at['2_1'], [east, north, east]  # 1_0 north leads to 1_1, whose row runs west only
    used, n_failed = manhattan.rebuild([*walks, wrong], true, near, 8)
    assert n_failed == 0 and used.items() - true.items() == {((at['1_1'], east), at['2_1'])}
    n_failed = [manhattan.rebuild([*walks, wrong], true, near, max_degree)[1] for max_degree in (2, 3)]
    assert n_failed == [1, 0]  # 1_1 already has two streets


@pytest.mark.slow
def test_a_manhattan_run_is_evaluated_and_its_map_drawn(tmp_path):
    out = tmp_path / 'city'
    result = succeeded(run(*TRAIN, '--data=manhattan:grid=4,steps=6,length=32,pairs=5,val_rows=5', '--block_size=32',
                           f'--max_tokens={4 * 8 * 32}', f'--out_dir={out}', '--sample_tokens=0'))
    assert 'next_token' in result.stdout
    drawn = succeeded(run('-m', 'analysis.scores', out, f'--out={tmp_path / "figure"}'))
    assert 'next_token' in drawn.stdout and 'valid' in drawn.stdout
    drawn = succeeded(run('-m', 'papers.nextlat.manhattan', out, f'--out={tmp_path / "map"}', '--n_walks=20',
                          '--n_prefixes=3'))
    assert ' rank ' in drawn.stdout and (tmp_path / 'map.png').exists()
    assert (tmp_path / 'map.csv').read_text().startswith('run,detours,')
