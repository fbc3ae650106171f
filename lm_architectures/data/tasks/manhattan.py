"""Random walks in a city of one-way streets, which a model must learn (NextLat's world modeling).

    python train.py --data=manhattan:grid=10 --block_size=256 ...               options: see Task
    python train.py --data=manhattan:edges=FILE.json --block_size=256 ...       a city of your own

A walk is start, destination, turns and the end of text, such as 0_0 3_2 E E E N N. A row is a
sequence of walks, the last one cut off. `--mask_documents=True`, the default, separates them. Start
and destination do not count, because they cannot be predicted. Walks have 1 to 100 steps, uniformly
(inferred from the paper's counts of walks and tokens). About one in twenty pairs of start and
destination is in no row; the score `valid` tests paths between these.

A city's file is JSON, {"edges": [[node, direction, neighbor], ...]}, or the authors' pickle of the
paper's Manhattan, {(node, direction): neighbor}; config/nextlat/manhattan.py says where to get it.
"""
import json
import pickle
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from lm_architectures.data.generated import greedy_answers, greedy_tokens
from lm_architectures.files import MissingData, UserError
from lm_architectures.settings import check_ranges


@dataclass
class Task:
    edges: str | None = None  # file of a city, .json or .pkl; None: a generated grid
    grid: int = 10  # streets each way of the generated grid, in alternating directions; must be even
    steps: int = 100  # maximum steps per walk
    length: int = 256  # inputs per row, T
    max_distance: int = 50  # maximum shortest-path length between pairs in the score `valid`
    pairs: int = 1000  # held-out pairs of start and destination in the score `valid`
    train_rows: int | None = 18_359_375  # rows in the training set, 4.7B tokens; None: unlimited
    val_rows: int = 256  # held-out rows for validation loss and next-token score
    symbol_options = 'edges', 'grid'

    def __post_init__(self):
        check_ranges(self, grid=(2, 100), steps=(1, 10_000), length=(4, 1_000_000), max_distance=(1, 10_000),
                     pairs=(1, 10 ** 6))
        if self.grid % 2:
            raise UserError(f'grid is {self.grid}: expected an even number, so that every place is reachable')
        edges = one_way_grid(self.grid) if self.edges is None else read_edges(self.edges)
        directions = sorted({direction for _, direction, _ in edges})
        self.nodes = sorted({node for a, _, b in edges for node in (a, b)})
        self.symbols = [*directions, *self.nodes]
        self.first_node, self.end = len(directions), len(self.symbols)
        node_id = {node: i for i, node in enumerate(self.nodes)}
        self.neighbor = np.full((len(self.nodes), len(directions)), -1)  # [node, direction]; -1: no street
        for a, direction, b in edges:
            self.neighbor[node_id[a], directions.index(direction)] = node_id[b]
        self.exits = [[(turn, b) for turn, b in enumerate(row) if b >= 0] for row in self.neighbor.tolist()]
        self.starts = [node for node, exits in enumerate(self.exits) if exits]
        pairs = np.random.default_rng(0).integers(256, size=2 * [len(self.nodes)], dtype=np.uint8)
        self.is_held_out = pairs < 13  # 5%
        self.row_tokens = self.length + 1

    def row(self, rng: np.random.Generator, split: str) -> np.ndarray:
        """Return packed random walks: ids (T + 1,)."""
        ids = []
        while len(ids) < self.row_tokens:
            ids += self._walk(rng)
        return np.array(ids[:self.row_tokens])

    def _walk(self, rng) -> list[int]:
        """Return the ids of a random walk whose (start, end) pair is not held out."""
        while True:
            start = node = self.starts[rng.integers(len(self.starts))]
            turns = []
            for choice in rng.random(rng.integers(1, self.steps + 1)).tolist():
                if not self.exits[node]:
                    break
                turn, node = self.exits[node][int(choice * len(self.exits[node]))]
                turns.append(turn)
            if node != start and not self.is_held_out[start, node]:
                return [self.first_node + start, self.first_node + node, *turns, self.end]

    def targets(self, rows):
        """Return the targets (B, T) of rows (B, T + 1): turns and ends count, but no places."""
        idx = rows[:, :-1]
        is_node = (idx >= self.first_node) & (idx < self.end)
        was_node = torch.nn.functional.pad(is_node, (1, -1))
        return rows[:, 1:].where((idx < self.first_node) | is_node & was_node, -1)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'next_token': fraction of legal argmax tokens, 'valid': of valid greedy paths}.

        A turn is legal if the street exists, an end if it is at the destination. A path is valid if
        all its tokens are legal.
        """
        tokens, pairs = greedy_tokens(model, idx, device, batch_size), self.held_out_pairs
        is_legal = torch.tensor([*map(self.legal, idx.tolist(), tokens.tolist())])[targets >= 0]
        prompts = (self.first_node + np.array(pairs)).tolist()
        ways = greedy_answers(model, prompts, self.steps + 1, batch_size, eos_id=self.end)
        valid = [self.is_valid(*pair, way) for pair, way in zip(pairs, ways)]
        return {'next_token': is_legal.double().mean().item(), 'valid': float(np.mean(valid))}

    def legal(self, ids: list[int], tokens: list[int]) -> list[bool]:
        """Return which of the tokens may follow the ids before them, which begin with a walk."""
        found, node, goal, before = [], 0, 0, self.end
        for x, token in zip(ids, tokens):
            if x < self.first_node:
                node = self.neighbor[node, x]
            elif x < self.end and self.first_node <= before < self.end:
                goal = x - self.first_node
            elif x < self.end:
                node = x - self.first_node
            is_street = token < self.first_node and self.neighbor[node, token] >= 0
            found.append(is_street or token == self.end and node == goal)
            before = x
        return found

    def is_valid(self, node: int, goal: int, ids: list[int]) -> bool:
        """Return True if ids are streets from a node to the goal, followed by the end."""
        walk = [self.first_node + node, self.first_node + goal, *ids]
        return ids[-1] == self.end and all(self.legal(walk[:-1], walk[1:])[1:])

    def distances_to(self, goals) -> np.ndarray:
        """Return shortest-path lengths (n goals, n nodes) to each goal, inf where there is none."""
        from scipy.sparse import csr_matrix  # here, because the import is slow
        from scipy.sparse.csgraph import dijkstra
        n = len(self.nodes)
        a, turn = (self.neighbor >= 0).nonzero()
        backwards = csr_matrix((np.ones(len(a)), (self.neighbor[a, turn], a)), shape=(n, n))
        return dijkstra(backwards, indices=goals, unweighted=True)

    @cached_property
    def held_out_pairs(self) -> list[tuple[int, int]]:
        """Return up to `pairs` held-out (start, goal) pairs at random, within reach."""
        goals = np.random.default_rng(1).permutation(len(self.nodes))
        distance = self.distances_to(goals)
        farthest = min(self.max_distance, self.steps)
        within = (distance >= 1) & (distance <= farthest) & self.is_held_out.T[goals]
        goal, start = within.nonzero()
        if not len(goal):
            raise UserError(f'the city has no held-out pair of places up to {farthest} streets apart: give a '
                            'larger one')
        order = np.random.default_rng(2).permutation(len(goal))[:self.pairs]
        return list(zip(start[order].tolist(), goals[goal[order]].tolist()))


def one_way_grid(n: int) -> list[tuple[str, str, str]]:
    """Return edges (node, direction, neighbor) of an n x n grid of nodes x_y.

    Even rows run east, others west; even columns south, others north. The outer ones form a ring.
    """
    edges = []
    for i, j in product(range(n), range(n - 1)):
        edges += [(f'{j}_{i}', 'E', f'{j + 1}_{i}') if i % 2 == 0 else (f'{j + 1}_{i}', 'W', f'{j}_{i}'),
                  (f'{i}_{j + 1}', 'S', f'{i}_{j}') if i % 2 == 0 else (f'{i}_{j}', 'N', f'{i}_{j + 1}')]
    return edges


class PlainValues(pickle.Unpickler):
    """Reads plain data only: other pickles can run their author's code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'the file contains {module}.{name}, which is not plain data')


def read_edges(path: str) -> list[tuple[str, str, str]]:
    """Return the edges of a city from its file, as text. UserError if it is malformed."""
    try:
        with open(path, 'rb') as file:
            if path.endswith('.pkl'):
                edges = [(*street, neighbor) for street, neighbor in PlainValues(file).load().items()]
            else:
                edges = json.load(file)['edges']
        edges = [(str(a), str(direction), str(b)) for a, direction, b in edges]
        nodes, directions = {node for a, _, b in edges for node in (a, b)}, {direction for _, direction, _ in edges}
        if (not edges or nodes & directions or not all(re.fullmatch(r'\w+', word) for word in nodes | directions)
                or len({(a, direction) for a, direction, _ in edges}) < len(edges)):
            raise ValueError('a word is missing or misplaced, or two edges leave a node in the same direction')
    except Exception as error:  # a damaged pickle may raise any
        kind = MissingData if isinstance(error, FileNotFoundError) else UserError
        raise kind(f'edges = {path} is not a city ({type(error).__name__}: {error}): expected {{"edges": [[node, '
                   'direction, neighbor], ...]}, words or numbers; leave out edges for a grid')
    return edges
