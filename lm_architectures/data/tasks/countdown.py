"""Countdown: combine four numbers into a fifth in three equations (NextLat's reasoning task).

    python train.py --data=countdown --block_size=27 --mask_documents=False ... options: Task

A row is the numbers, the target, pause tokens and the equations in the order they are solved:

    14,83,88,91,23 | | | | | | | | 83-14=69,91-88=3,69/3=23

Each equation replaces two of the remaining numbers by its result. Tokens are the integers 1 to
10,000 and | + - * / = (the last is inferred). The prompt, through the last |, does not count.

As in "Stream of Search" (Gandhi et al.), numbers and target are drawn until solvable, and the
solution is the first found by depth-first search. It tries pairs in order, and a + b, a * b, larger
minus smaller and, if whole, larger over smaller. A tenth of the targets appear only in held-out
rows.
"""
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from lm_architectures.data.generated import greedy_answers
from lm_architectures.settings import check_ranges

OPERATIONS = '+*-/'
PAIRS = {n: list(combinations(range(n), 2)) for n in (4, 3, 2)}
REST = {n: [[k for k in range(n) if k not in pair] for pair in PAIRS[n]] for n in PAIRS}


@dataclass
class Task:
    largest: int = 10_000  # largest integer with a token
    pauses: int = 8  # number of | tokens between target and equations
    val_targets: Literal['unseen', 'seen'] = 'unseen'  # targets of the held-out rows: not in training, or in training
    train_rows: int | None = 500_000  # problems in the training set; None: unlimited
    val_rows: int = 10_000  # held-out problems for validation loss and scores
    symbol_options = 'largest',

    def __post_init__(self):
        check_ranges(self, largest=(100, 10 ** 6), pauses=(1, 1000))
        self.symbols = [*map(str, range(1, self.largest + 1)), '|', *OPERATIONS, '=']
        self.pause, self.equals = self.largest, len(self.symbols) - 1
        self.prompt_tokens = 5 + self.pauses
        self.row_tokens = self.prompt_tokens + 15
        targets = np.random.default_rng(0).permutation(np.arange(10, 101))
        n_unseen = round(len(targets) / 10)
        self.targets_of = {'unseen': targets[:n_unseen], 'seen': targets[n_unseen:]}

    def row(self, rng: np.random.Generator, split: str) -> np.ndarray:
        """Return a problem with its solution: ids (T + 1,)."""
        targets = self.targets_of[self.val_targets if split == 'val' else 'seen']
        target, equations = int(rng.choice(targets)), None
        while equations is None:  # about one in seven draws of four numbers is solvable
            numbers, equations = solve(rng.integers(1, 100, size=(8, 4)), target, self.largest)
        row = np.full(self.row_tokens, self.pause)
        row[:5] = [n - 1 for n in (*numbers, target)]
        row[self.prompt_tokens:] = [token for a, operation, b, result in equations for token in (
            a - 1, self.pause + 1 + OPERATIONS.index(operation), b - 1, self.equals, result - 1)]
        return row

    def targets(self, rows):
        """Return the targets (B, T) of rows (B, T + 1), which count from the last | on."""
        is_prompt = (rows[:, :-1] == self.pause).cumsum(1) < self.pauses
        return rows[:, 1:].masked_fill(is_prompt, -1)

    def score(self, model, idx, targets, device, batch_size):
        """Return fractions of greedy answers, 'solved' and 'valid_1' to 'valid_3': see `marks`."""
        prompts = idx[:, :self.prompt_tokens].tolist()
        marks = np.array([*map(self.marks, prompts, greedy_answers(model, prompts, 15, batch_size))])
        return dict(zip(('solved', 'valid_1', 'valid_2', 'valid_3'), marks.mean(0).tolist()))

    def marks(self, prompt, answer) -> tuple[bool, ...]:
        """Return four bools for prompt and answer ids: solved; equation 1, 2, 3 is true.

        A problem is solved if all three equations are true, each takes two of the remaining
        numbers, and the last gives the target.
        """
        left, target = Counter(token + 1 for token in prompt[:4]), prompt[4] + 1
        equations = [self.parse_equation(*answer[start:start + 5]) for start in (0, 5, 10)]
        if None not in equations:
            for a, b, result in equations:
                left = left - Counter([a, b]) + Counter([result])  # if a and b are there, one number fewer
        return left == Counter([target]), *(equation is not None for equation in equations)

    def parse_equation(self, a, operation, b, equals, result) -> tuple | None:
        """Return (a, b, result) if the five ids form a true equation, else None."""
        if max(a, b, result) >= self.largest or not self.pause < operation < self.equals or equals != self.equals:
            return None
        a, b, result = a + 1, b + 1, result + 1
        values = {'+': a + b, '*': a * b, '-': a - b, '/': a / b}
        return (a, b, result) if values[OPERATIONS[operation - self.pause - 1]] == result else None


def solve(numbers, target: int, largest: int) -> tuple:
    """Return the first solvable row of numbers (N, 4) and its three equations, or (None, None).

    No result exceeds `largest`. Evaluates all 1,152 ways per row at once, in depth-first order.
    """
    left = numbers
    for n in (4, 3, 2):
        left = combine_pairs(left.reshape(-1, n), largest)
    found = left.reshape(len(numbers), -1) == target
    if not found.any():
        return None, None
    first = found.any(1).argmax()
    choices = np.unravel_index(found[first].argmax(), (6, 4, 3, 4, 1, 4))  # pair and operation, three times
    left, equations = numbers[first].tolist(), []
    for pair, operation in zip(choices[::2], choices[1::2]):
        n = len(left)
        a, b = (left[k] for k in PAIRS[n][pair])
        if operation >= 2:
            a, b = max(a, b), min(a, b)
        result = (a + b, a * b, a - b, a // b)[operation]
        equations.append((a, OPERATIONS[operation], b, result))
        left = [*(left[k] for k in REST[n][pair]), result]
    return numbers[first].tolist(), equations


def combine_pairs(numbers, largest: int):
    """Return the numbers (N, pairs, 4, n - 1) left after each operation on each pair of (N, n).

    The result comes last: 0 if it is invalid, above `largest`, or computed from such a 0.
    """
    n = numbers.shape[1]
    a, b = (numbers[:, column] for column in np.transpose(PAIRS[n]))
    high, low = np.maximum(a, b), np.minimum(a, b)
    divisor = np.maximum(low, 1)
    quotient = np.where(high % divisor == 0, high // divisor, 0)
    results = np.stack([a + b, a * b, high - low, quotient], -1)
    results[(low[..., None] == 0) | (results > largest)] = 0
    rest = numbers[:, np.array(REST[n], int)]
    return np.concatenate([np.stack([rest] * 4, 2), results[..., None]], -1)
