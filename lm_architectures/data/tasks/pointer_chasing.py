"""Pointer chasing: a chain of tables, where each looks up keys of the one below.

    python train.py --data=pointer_chasing:hops=10,keys=5 --block_size=338 ...   options: see Task

The task of "Context-Ready Transformer", section 5.6 and appendix B. The base table gives each of M
keys a value. Each of the H index tables above it maps M new keys to the keys of the table below by
a random bijection. Queries follow each table; their answers are values. A query at level l takes l
look-ups in index tables and one in the base table; or one look-up and the answer to a query one
level below, which is in the input, perhaps within the window.

    table    v3 = A        the key's content is on its left, where causal attention finds it
    query    Q A v3        the target of A is v3; no other position counts

`||` follows each table and each table's queries. Keys are in a fixed order at each level; the base
table's values all differ. The last level has one query, for its first key, whose answer is only a
target. So T = (6 M + 2) H + 3 M + 3.

Appendix B asks for "every key at every level defined so far" after each table; its worked example
and this task, only for that table's keys. Else queries would exceed the paper's window of 38.
"""
import string
from dataclasses import dataclass

import numpy as np

from lm_architectures.data.generated import SOLVED, greedy_tokens
from lm_architectures.files import UserError
from lm_architectures.settings import check_ranges

EQUALS, QUERY, FIRST_VALUE = 0, 1, 2  # ids; the values are followed by the keys, level by level, and `||`


@dataclass
class Task:
    hops: int = 10  # index tables above the base table, H
    keys: int = 5  # keys of each table, M
    values: int = 10  # number of values that the base table draws from
    val_rows: int = 1000  # held-out rows for validation loss and scores
    train_rows = None  # unlimited
    symbol_options = 'hops', 'keys', 'values'

    def __post_init__(self):
        check_ranges(self, hops=(0, 1000), keys=(1, 1000), values=(1, 1_000_000))
        if self.values < self.keys:
            raise UserError(f'values = {self.values} and keys = {self.keys}: the keys of the base table have different '
                            'values, so there must be at least as many values as keys')
        M, n_keys = self.keys, self.keys * (self.hops + 1)
        letters = string.ascii_uppercase.replace('Q', '')  # as in the paper, if they suffice
        names = letters[:n_keys] if n_keys <= len(letters) else [f'K{i // M}_{i % M}' for i in range(n_keys)]
        self.symbols = ['=', 'Q', *(f'v{i}' for i in range(self.values)), *names, '||']
        self.first_key, self.separator = FIRST_VALUE + self.values, len(self.symbols) - 1
        self.row_tokens = (6 * M + 2) * self.hops + 3 * M + 4

    def row(self, rng: np.random.Generator, split: str) -> np.ndarray:
        """Return a row of random tables: ids (T + 1,)."""
        return self.encode(rng.permutation(self.values)[:self.keys], rng.random((self.hops, self.keys)).argsort(1))

    def encode(self, base, maps) -> np.ndarray:
        """Return the row (T + 1,) of given tables, base (M,) and maps (H, M).

        Key k has the value base[k], or in level l points to key maps[l - 1, k] one level below.
        """
        keys = self.first_key + np.arange((self.hops + 1) * self.keys).reshape(-1, self.keys)  # (level, key)
        equals, query, separator = [EQUALS] * self.keys, [QUERY] * self.keys, [self.separator]
        left = answers = FIRST_VALUE + np.asarray(base)  # what each key of a level maps to, and its value
        parts = []
        for level in range(self.hops + 1):
            if level:
                left, answers = keys[level - 1][maps[level - 1]], answers[maps[level - 1]]
            table, queries = np.stack([left, equals, keys[level]], 1), np.stack([query, keys[level], answers], 1)
            parts += [table.ravel(), separator, queries.ravel(), separator]
        return np.concatenate(parts)[:self.row_tokens]  # keeps only the first query of the last level

    def targets(self, rows):
        """Return the targets (B, T) of rows (B, T + 1), which count at keys directly after Q."""
        after_query = (rows[:, :-1] == QUERY).roll(1, 1)  # the last input is a key, so no Q wraps around
        return rows[:, 1:].masked_fill(~after_query, -1)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_0' ... 'accuracy_H': accuracy per level, 'levels_solved': a count}."""
        is_right = greedy_tokens(model, idx, device, batch_size) == targets
        level = (idx - self.first_key) // self.keys
        accuracy = [is_right[(targets >= 0) & (level == l)].float().mean().item() for l in range(self.hops + 1)]
        found = {f'accuracy_{l}': a for l, a in enumerate(accuracy)}
        return found | {'levels_solved': sum(a >= SOLVED for a in accuracy)}
