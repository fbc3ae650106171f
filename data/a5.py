"""The word problem of A5, the 60 even permutations of five: state tracking, from the NextLat paper's RNN section.

    python train.py --data=a5:length=12 --block_size=12 --documents=False ...              options: the fields of Task

The group cannot be solved, so no Transformer of fixed depth and precision follows words of every length. A row is a
word of random elements and its product. The target at each position is the state there, the product so far, and not
the next token:

    inputs    x_1     x_2       ...  x_T
    targets   x_1     x_1 x_2   ...  x_1 x_2 ... x_T

An element is written as five digits, the arrangement that it makes of 12345. The product x y applies x after y as a
permutation: y rearranges what x has made, so 23145 13425 = 21435. The training set has a million fixed words; at 12
letters, two equal ones are practically impossible.
"""
from dataclasses import dataclass
from functools import reduce
from itertools import permutations

import numpy as np
import torch

from common.settings import check_ranges
from data.tasks import greedy_tokens

LETTERS = 5


def is_even(p: tuple) -> bool:
    """Return True if an even number of pairs is in the wrong order."""
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 0


ELEMENTS = [p for p in permutations(range(LETTERS)) if is_even(p)]  # id 0 is the identity
ID_OF = {p: i for i, p in enumerate(ELEMENTS)}
PRODUCT = [[ID_OF[tuple(x[k] for k in y)] for y in ELEMENTS] for x in ELEMENTS]  # PRODUCT[x][y]: x y


@dataclass
class Task:
    length: int = 12  # elements of a word, T
    train_rows: int | None = 1_000_000  # words in the training set; None: unlimited
    val_rows: int = 100_000  # held-out words, for the validation loss and the scores

    symbol_options = ()  # words of every length have the same symbols

    def __post_init__(self):
        check_ranges(self, length=(1, 10_000), train_rows=(1, 10 ** 12), val_rows=(1, 10 ** 7))
        self.symbols = [''.join(str(k + 1) for k in p) for p in ELEMENTS]
        self.row_tokens = self.length + 1

    def row(self, rng: np.random.Generator) -> np.ndarray:
        """Return a random word and its product: ids (T + 1,)."""
        word = rng.integers(len(ELEMENTS), size=self.length)
        return np.append(word, reduce(lambda state, x: PRODUCT[state][x], word.tolist()))

    def targets(self, rows):
        """rows (B, T + 1) -> the states (B, T)."""
        return products(rows[:, :-1])

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_1' ... 'accuracy_T': share of words with the right state at each position}.

        For NextLat also 'rnn_accuracy_1' ...: p_psi alone, as an RNN.
        """
        found = {'accuracy': greedy_tokens(model, idx, device, batch_size)}
        if hasattr(model, 'dynamics'):  # the weights of p_psi
            parts = idx.to(device).split(batch_size)
            found['rnn_accuracy'] = torch.cat([recurrent_states(model, part).cpu() for part in parts])
        return {f'{name}_{t}': accuracy for name, states in found.items()
                for t, accuracy in enumerate((states == targets).double().mean(0).tolist(), 1)}


def products(words):
    """Return the products of the first 1, 2, ... T elements of words (B, T): (B, T)."""
    table, states = torch.tensor(PRODUCT), [words[:, 0]]
    for x in words[:, 1:].unbind(1):
        states.append(table[states[-1], x])
    return torch.stack(states, 1)


@torch.no_grad()
def recurrent_states(model, idx):
    """Return the states (B, T) by p_psi for words idx (B, T): h_1 from the Transformer, h_t = p_psi(h_{t-1}, x_t)."""
    hidden = [model.final_hidden(idx[:, :1])[:, 0]]
    for x in idx[:, 1:].unbind(1):
        hidden.append(model.p_psi(hidden[-1], x))
    return model.head(torch.stack(hidden, 1))[..., :model.config.n_ids].argmax(-1)
