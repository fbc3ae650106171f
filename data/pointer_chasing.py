"""Pointer chasing: a chain of tables, each to be looked up in the one before.

    python -m data pointer_chasing:hops=2,keys=3                                     a row and its targets
    python train.py --data=pointer_chasing:hops=10,keys=5 --block_size=338 ...       options: the fields of Task

The task of "Context-Ready Transformer", section 5.6 and appendix B.

The base table gives each of M keys a value. Each of the H index tables above it maps M new keys to the keys of the
table below, by a random bijection. Its queries follow each table, and their answers are values at every level: a query
at level l takes l look-ups from table to table and one in the base table; or one look-up and the answer to a query of
the level below, which is part of the input and may lie within the window. Everything is written as triplets,

    table    v3 = A        what a key stands for is left of it, where causal attention finds it
    query    Q A v3        the target of A is v3; no other position counts

and `||` follows each table and each table's queries. Keys are in a fixed order, and each level has its own; the base
table's values all differ. The last level ends with one query, for its first key, whose answer is only a target. So
T = (6 M + 2) H + 3 M + 3. With few keys and hops, a fresh row sometimes repeats a held-out one.

Appendix B's text asks for "every key at every level defined so far" after each table, but its worked example asks only
for that table's keys. Rows follow the example: with the longer queries, the last ones would be too far from their table
for the paper's window of 38.
"""
import string
from dataclasses import dataclass

import numpy as np

from common.files import UserError
from common.settings import check_ranges
from data.tasks import greedy_tokens

SOLVED = 0.99  # accuracy from which on a level counts as solved
EQUALS, QUERY, FIRST_VALUE = 0, 1, 2  # ids; after the values come the keys, level by level, then `||`


@dataclass
class Task:
    hops: int = 10  # index tables above the base table, H
    keys: int = 5  # keys of each table, M
    values: int = 10  # values that the base table's are drawn from
    val_rows: int = 1000  # held-out rows, for the validation loss and the scores

    train_rows = None  # unlimited

    def __post_init__(self):
        check_ranges(self, hops=(0, 1000), keys=(1, 1000), values=(1, 1_000_000), val_rows=(1, 10 ** 7))
        if self.values < self.keys:
            raise UserError(f'values = {self.values} and keys = {self.keys}: the keys of the base table have different '
                            'values, so there must be at least as many')
        M, n_keys = self.keys, self.keys * (self.hops + 1)
        letters = string.ascii_uppercase.replace('Q', '')  # as in the paper, while they last
        names = letters[:n_keys] if n_keys <= len(letters) else [f'K{i // M}_{i % M}' for i in range(n_keys)]
        self.symbols = ['=', 'Q', *(f'v{i}' for i in range(self.values)), *names, '||']
        self.first_key, self.separator = FIRST_VALUE + self.values, len(self.symbols) - 1
        self.row_tokens = (6 * M + 2) * self.hops + 3 * M + 4

    def row(self, rng: np.random.Generator) -> np.ndarray:
        """Return a row of random tables: ids (T + 1,)."""
        return self.encode(rng.permutation(self.values)[:self.keys], rng.random((self.hops, self.keys)).argsort(1))

    def encode(self, base, maps) -> np.ndarray:
        """Return the row (T + 1,) of given tables, base (M,) and maps (H, M).

        Key k of level 0 has value base[k]; key k of level l stands for key maps[l - 1, k] of level l - 1.
        """
        H, M = self.hops, self.keys
        key = self.first_key + np.arange((H + 1) * M).reshape(H + 1, M)
        answers = [np.asarray(base)]
        for table in maps:
            answers.append(answers[-1][table])
        parts = np.full((H + 1, 2, 3 * M + 1), self.separator)  # level, table or queries, place
        triplets = np.empty((H + 1, 2, M, 3), np.int64)  # level, table or queries, key, place in its triplet
        triplets[0, 0, :, 0] = FIRST_VALUE + answers[0]
        triplets[1:, 0, :, 0] = key[:-1, :1] + maps
        triplets[:, 0, :, 1] = EQUALS
        triplets[:, 0, :, 2] = key
        triplets[:, 1, :, 0] = QUERY
        triplets[:, 1, :, 1] = key
        triplets[:, 1, :, 2] = FIRST_VALUE + np.stack(answers)
        parts[..., :-1] = triplets.reshape(H + 1, 2, 3 * M)
        return parts.ravel()[:self.row_tokens]  # of the last level's queries only the first

    def counted(self, idx):
        """idx (B, T) -> (B, T) bool: a key directly after Q."""
        return (idx == QUERY).roll(1, 1)  # the last input is a key: no Q comes round to the front

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_0' ... 'accuracy_H': share of right answers per level, 'levels_solved': those of 0.99}."""
        is_right = greedy_tokens(model, idx, device, batch_size) == targets
        level = (idx - self.first_key) // self.keys
        accuracy = [is_right[(targets >= 0) & (level == l)].float().mean().item() for l in range(self.hops + 1)]
        n_solved = sum(a >= SOLVED for a in accuracy)
        return {**{f'accuracy_{l}': a for l, a in enumerate(accuracy)}, 'levels_solved': n_solved}
