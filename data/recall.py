"""Recall: the value of a key, asked for a chosen number of tokens later.

    python train.py --data=recall:pairs=8,distances=8-16-32-64 --block_size=128 ...        options: the fields of Task

A row is filler tokens, and among them pairs of a key and its value. Each key is asked for once, by Q and the key; the
value follows, and no other position counts:

    f3 k5 v2 f0 f7 f1 ... f4 Q  k5 v2 f6 ...
       |                        |
       the pair at p            the query at p + distance, whose target is v2

The distance is counted from the key in its pair to the key in its query, as it is from the value that is read to the
value that is predicted. Every row asks at all distances; each pair is asked for at one, and no distance has over one
pair more than another. The keys of a row are all different, values and fillers are drawn freely, and places are random.

A model may also learn to look back by exactly these distances, which is not recall. Rows of other distances tell:
python eval.py RUN --val --data=recall:distances=12-24-48.
"""
from dataclasses import dataclass

import numpy as np
import torch

from common.files import UserError
from common.settings import check_ranges
from data.tasks import greedy_tokens

QUERY, FIRST_VALUE = 0, 1  # ids; after the values come the keys, then the fillers
NEAREST = 3  # distance: the query's Q comes directly after the pair's value
TRIES = 100  # draws of places until a row counts as too short


@dataclass
class Task:
    pairs: int | None = None  # pairs of a key and a value in a row, each asked for once; None: 8, or all keys of fewer
    distances: str = '8-16-32-64'  # tokens from pair to query: those that every row asks at
    length: int = 128  # inputs of a row, T
    keys: int = 16  # keys that those of a row are drawn from
    values: int = 10  # values that there are: a guess is right once in so many
    fillers: int = 10  # filler tokens that there are
    val_rows: int = 1000  # held-out rows, for the validation loss and the scores

    train_rows = None  # unlimited
    symbol_options = 'keys', 'values', 'fillers'  # rows of any length and distances have the same symbols

    def __post_init__(self):
        self.pairs = min(8, self.keys) if self.pairs is None else self.pairs
        check_ranges(self, pairs=(1, 10_000), length=(NEAREST + 1, 1_000_000), keys=(1, 1_000_000),
                     values=(1, 1_000_000), fillers=(1, 1_000_000), val_rows=(1, 10 ** 7))
        parts = self.distances.split('-')
        if not all(part.isdecimal() and len(part) < 8 and int(part) >= NEAREST for part in parts):
            raise UserError(f'distances is {self.distances!r}: expected whole numbers of at least {NEAREST} joined by '
                            '-, as 8-16-32-64')
        self.all_distances = sorted({int(part) for part in parts})
        if not len(self.all_distances) <= self.pairs <= self.keys:
            raise UserError(f'pairs is {self.pairs}: expected at least one for each of {len(self.all_distances)} '
                            f'distances, and at most the {self.keys} keys, as those of a row are different')
        n = len(self.all_distances)
        self.distance_of_pair = sorted((self.all_distances[i % n] for i in range(self.pairs)), reverse=True)
        self.row_tokens = self.length + 1
        self.first_key = FIRST_VALUE + self.values
        self.first_filler = self.first_key + self.keys
        self.symbols = ['Q', *(f'v{i}' for i in range(self.values)), *(f'k{i}' for i in range(self.keys)),
                        *(f'f{i}' for i in range(self.fillers))]
        rng = np.random.default_rng(0)
        if all(self.draw_places(rng) is None for _ in range(TRIES)):
            raise UserError(f'length is {self.length}: {self.pairs} pairs and their queries at {self.distances} tokens '
                            'do not fit; make it larger')

    def draw_places(self, rng) -> list[int] | None:
        """Draw the position of each pair's key, longest distance first; None if there is no room for one."""
        is_free, places = np.ones(self.row_tokens, bool), []
        for distance in self.distance_of_pair:
            taken = np.array([0, 1, distance - 1, distance, distance + 1])  # key value ... Q key value, from the key on
            n = self.row_tokens - taken[-1]
            room = np.flatnonzero(np.all([is_free[i:i + n] for i in taken], 0)) if n > 0 else []
            if len(room) == 0:
                return None
            places.append(int(room[rng.integers(len(room))]))
            is_free[places[-1] + taken] = False
        return places

    def row(self, rng: np.random.Generator) -> np.ndarray:
        """Return a row with random key-value pairs at random positions: ids (T + 1,)."""
        places = None
        while places is None:
            places = self.draw_places(rng)
        row = self.first_filler + rng.integers(self.fillers, size=self.row_tokens)
        pair = np.stack([self.first_key + rng.permutation(self.keys)[:self.pairs],
                         FIRST_VALUE + rng.integers(self.values, size=self.pairs)], 1)
        start, query = np.array(places), np.array(places) + self.distance_of_pair
        row[start[:, None] + [0, 1]] = pair
        row[query - 1] = QUERY
        row[query[:, None] + [0, 1]] = pair
        return row

    def counted(self, idx):
        """idx (B, T) -> (B, T) bool: a key directly after Q."""
        return (idx == QUERY).roll(1, 1)  # the last input is no Q, which its key follows: none comes round

    def asked_distance(self, idx):
        """Return the tokens from pair to query at the positions that count, elsewhere 0: idx (B, T) -> (B, T)."""
        query = self.counted(idx).nonzero()[:, 1].view(len(idx), self.pairs)
        keys = idx.gather(1, query)
        pair = torch.stack([(idx == key).int().argmax(1) for key in keys.split(1, 1)], 1)  # where a key is first
        return torch.zeros_like(idx).scatter(1, query, query - pair)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_8' ...: share of right answers at each distance}."""
        is_right, distance = greedy_tokens(model, idx, device, batch_size) == targets, self.asked_distance(idx)
        return {f'accuracy_{d}': is_right[distance == d].float().mean().item() for d in self.all_distances}
