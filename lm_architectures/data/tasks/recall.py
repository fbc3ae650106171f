"""Recall: return the value of a key seen a given number of tokens earlier.

    python train.py --data=recall:pairs=8,distances=8-16-32-64 --block_size=128 ...  see Task

A row contains filler tokens and pairs of a key and its value. Each key is queried once, by Q and
the key; the value follows, and no other position counts:

    f3 k5 v2 f0 f7 f1 ... f4 Q  k5 v2 f6 ...
       |                        |
       the pair at p            the query at p + distance, whose target is v2

The distance is that between the two occurrences of the key, and of the value. Each pair is queried
at one distance; every row uses all distances, as equally as possible. The keys of a row are all
different; values, fillers and positions are random.

A model may learn to look back by exactly these distances, which is not recall. To tell, evaluate on
other distances: python eval.py RUN --val --data=recall:distances=12-24-48.
"""
from dataclasses import dataclass

import numpy as np
import torch

from lm_architectures.data.generated import greedy_tokens
from lm_architectures.files import UserError
from lm_architectures.settings import check_ranges

QUERY, FIRST_VALUE = 0, 1  # ids; the values are followed by the keys and the fillers
MIN_DISTANCE = 3  # smallest distance: Q directly follows the pair's value
TRIES = 100  # random attempts before a row counts as too short


@dataclass
class Task:
    pairs: int | None = None  # key-value pairs per row, each queried once; None: 8, or `keys` if fewer
    distances: tuple[int, ...] = (8, 16, 32, 64)  # distances from pair to query, all in every row
    length: int = 128  # inputs per row, T
    keys: int = 16  # number of different keys
    values: int = 10  # number of different values; chance accuracy is 1 / values
    fillers: int = 10  # number of different filler tokens
    val_rows: int = 1000  # held-out rows for validation loss and scores

    train_rows = None  # unlimited
    symbol_options = 'keys', 'values', 'fillers'  # the symbols do not depend on length and distances

    def __post_init__(self):
        self.pairs = min(8, self.keys) if self.pairs is None else self.pairs
        check_ranges(self, pairs=(1, 10_000), length=(MIN_DISTANCE + 1, 1_000_000), keys=(1, 1_000_000),
                     values=(1, 1_000_000), fillers=(1, 1_000_000))
        if not self.distances or min(self.distances) < MIN_DISTANCE:
            raise UserError(f'distances is {self.distances}: expected integers of at least {MIN_DISTANCE} joined by -, '
                            'such as 8-16-32-64')
        self.all_distances = sorted(set(self.distances))
        if not len(self.all_distances) <= self.pairs <= self.keys:
            raise UserError(f'pairs is {self.pairs}: expected at least {len(self.all_distances)}, the number of '
                            f'distances, and at most {self.keys}, the number of keys')
        n = len(self.all_distances)
        self.distance_of_pair = sorted((self.all_distances[i % n] for i in range(self.pairs)), reverse=True)
        self.row_tokens = self.length + 1
        self.first_key = FIRST_VALUE + self.values
        self.first_filler = self.first_key + self.keys
        self.symbols = ['Q', *(f'v{i}' for i in range(self.values)), *(f'k{i}' for i in range(self.keys)),
                        *(f'f{i}' for i in range(self.fillers))]
        rng = np.random.default_rng(0)
        if all(self.draw_places(rng) is None for _ in range(TRIES)):
            raise UserError(f'length is {self.length}: {self.pairs} pairs with queries at distances {self.distances} '
                            'do not fit: increase length')

    def draw_places(self, rng) -> list[int] | None:
        """Draw the position of each pair's key, longest distance first; None if they do not fit."""
        is_free, places = np.ones(self.row_tokens, bool), []
        for distance in self.distance_of_pair:
            taken = np.array([0, 1, distance - 1, distance, distance + 1])  # key value ... Q key value
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
        """Return a mask (B, T) of idx (B, T): keys directly after Q."""
        return (idx == QUERY).roll(1, 1)  # the last input is never Q, so none wraps around

    def asked_distance(self, idx):
        """Return (B, T): the distance from pair to query where idx (B, T) is counted, else 0."""
        query = self.counted(idx).nonzero()[:, 1].view(len(idx), self.pairs)
        keys = idx.gather(1, query)
        pair = torch.stack([(idx == key).int().argmax(1) for key in keys.split(1, 1)], 1)  # first occurrence of the key
        return torch.zeros_like(idx).scatter(1, query, query - pair)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_8' ...: accuracy at each distance}."""
        is_right, distance = greedy_tokens(model, idx, device, batch_size) == targets, self.asked_distance(idx)
        return {f'accuracy_{d}': is_right[distance == d].float().mean().item() for d in self.all_distances}
