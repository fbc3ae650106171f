"""Path-star graphs (Bachmann and Nagarajan, "The pitfalls of next-token prediction").

    python train.py --data=path_star:degree=2,length=5,nodes=20 --block_size=31 ...    see Task

NextLat's planning task. In G(d, l), d arms of l - 1 nodes leave a start node; all nodes differ, out
of N. A row is the edges in random order, start and goal (the end of one arm), and the path between:

    a,b|c,d|...|y,z/start,goal=start,...,goal

Tokens are the nodes and | / =; `$` is in the vocabulary, as in the authors' files, but in no row.
The prompt, up to and including =, does not count. Only the first step is hard: the model must know
which arm leads to the goal.
"""
from dataclasses import dataclass

import numpy as np

from lm_architectures.data.generated import greedy_tokens
from lm_architectures.files import UserError
from lm_architectures.settings import check_ranges


@dataclass
class Task:
    degree: int = 2  # number of arms, d
    length: int = 10  # nodes on a path, including start and goal, l
    nodes: int = 100  # number of node names to draw from, N
    train_rows: int | None = 200_000  # graphs in the training set; None: unlimited
    val_rows: int = 20_000  # held-out graphs for validation loss and score
    symbol_options = 'degree', 'length', 'nodes'

    def __post_init__(self):
        check_ranges(self, degree=(1, 10_000), length=(2, 10_000), nodes=(2, 1_000_000))
        self.n_edges = self.degree * (self.length - 1)
        if self.nodes <= self.n_edges:
            raise UserError(f'nodes = {self.nodes}: a graph of degree {self.degree} and length {self.length} needs '
                            f'{self.n_edges + 1} nodes')
        self.symbols = [*map(str, range(self.nodes)), '|', '=', '/', '$']
        self.bar, self.equals, self.slash = range(self.nodes, self.nodes + 3)
        self.row_tokens = 3 * self.n_edges + 3 + self.length

    def row(self, rng: np.random.Generator, split: str) -> np.ndarray:
        """Return a row of a random graph: ids (T + 1,)."""
        names, E = rng.permutation(self.nodes), self.n_edges
        arms = np.empty((self.degree, self.length), np.int64)  # the goal ends the first arm
        arms[:, 0] = names[0]
        arms[:, 1:] = names[1:E + 1].reshape(self.degree, self.length - 1)
        order = rng.permutation(E)
        row = np.empty(self.row_tokens, np.int64)
        row[0:3 * E:3] = arms[:, :-1].ravel()[order]
        row[1:3 * E:3] = arms[:, 1:].ravel()[order]
        row[2:3 * E:3] = self.bar
        row[3 * E - 1:3 * E + 3] = self.slash, arms[0, 0], arms[0, -1], self.equals
        row[3 * E + 3:] = arms[0]
        return row

    def targets(self, rows):
        """Return the targets (B, T) of rows (B, T + 1), which count from = on."""
        return rows[:, 1:].masked_fill((rows[:, :-1] == self.equals).cumsum(1) == 0, -1)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy': fraction of graphs whose path is all argmax, given true prefixes}."""
        right = (greedy_tokens(model, idx, device, batch_size) == targets) | (targets < 0)
        return {'accuracy': right.all(1).float().mean().item()}
