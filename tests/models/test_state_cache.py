"""StateCache against lists of each row's tokens."""
import random

import torch

from state_cache import StateCache


def test_windows_hold_the_last_tokens_of_rows_of_different_lengths_after_rollbacks():
    rng, B, back, max_call = random.Random(0), 3, 2, 4
    cache = StateCache({'a': torch.zeros(B, back + max_call, 1, dtype=torch.int64)}, max_call)
    rows = [[0] * back for _ in range(B)]  # zeros before position 0
    for _ in range(60):
        n = rng.choice([1, 2, max_call, 9])
        lengths = None if rng.random() < 0.3 else [rng.randint(1, n) for _ in rows]
        x = torch.randint(1, 1000, (B, n, 1))
        cache.begin(n, lengths and torch.tensor(lengths))
        assert cache.last('a', back).squeeze(-1).tolist() == [row[-back:] for row in rows]
        cache.push('a', x)
        last = cache.end(x)
        for b, row in enumerate(rows):
            row += x[b, :lengths[b] if lengths else n, 0].tolist()
            assert last[b] == row[-1]
        room = min(max_call, *(lengths or [n]))
        for _ in range(2):  # twice
            gone = [rng.randint(0, room // 2) for _ in rows]
            cache.rollback(torch.tensor(gone))
            rows = [row[:len(row) - k] for row, k in zip(rows, gone)]
        assert cache.lengths.tolist() == [len(row) - back for row in rows]


def test_a_row_without_new_tokens_keeps_its_state():
    cache = StateCache({'a': torch.zeros(2, 3, 1)}, 2)
    states = torch.tensor([[[1.0], [2], [3]], [[5], [5], [5]]])
    for t, counts in enumerate([[1, 1], [1, 0], [1, 0]]):
        cache.begin(1, torch.tensor(counts))
        cache.push('a', states[:, t:t + 1])
        cache.end(states[:, t:t + 1])
    cache.begin(1)
    assert cache.lengths.tolist() == [3, 1] and cache.last('a', 2).squeeze(-1).tolist() == [[2, 3], [0, 5]]
