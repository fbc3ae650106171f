"""Word problem of A5, the 60 even permutations of five: state tracking (NextLat paper, RNNs).

    python train.py --data=a5:length=12 --block_size=12 --mask_documents=False ... options: Task

No Transformer of fixed depth and precision can track words of every length. A row is a word of
random elements x_1 ... x_T. The target at each position t is the product so far, x_1 x_2 ... x_t,
not the next token. An element is written as five digits, its arrangement of 12345. The product x y
applies x after y: y rearranges what x has made, so 23145 13425 = 21435.
"""
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
import torch

from lm_architectures.data.generated import greedy_tokens
from lm_architectures.settings import check_ranges

# Even permutations have an even number of pairs out of order. Id 0 is the identity.
ELEMENTS = [p for p in permutations(range(5)) if sum(a > b for a, b in combinations(p, 2)) % 2 == 0]
PRODUCT = torch.tensor([[ELEMENTS.index(tuple(x[k] for k in y)) for y in ELEMENTS] for x in ELEMENTS])  # [x, y] = x y


@dataclass
class Task:
    length: int = 12  # elements per word, T
    train_rows: int | None = 1_000_000  # words in the training set; None: unlimited
    val_rows: int = 100_000  # held-out words for validation loss and scores
    symbol_options = ()  # the symbols do not depend on the length

    def __post_init__(self):
        check_ranges(self, length=(1, 10_000))
        self.symbols = [''.join(str(k + 1) for k in p) for p in ELEMENTS]
        self.row_tokens = self.length + 1

    def row(self, rng: np.random.Generator, split: str) -> np.ndarray:
        """Return random elements: ids (T + 1,). The last one is not used."""
        return rng.integers(len(ELEMENTS), size=self.length + 1)

    def targets(self, rows):
        """Return the products (B, T) of the first 1, 2, ... T elements of rows (B, T + 1)."""
        states = [rows[:, 0]]
        for x in rows[:, 1:-1].unbind(1):
            states.append(PRODUCT[states[-1], x])
        return torch.stack(states, 1)

    def score(self, model, idx, targets, device, batch_size):
        """Return {'accuracy_1' ...: fraction of right states}, 'rnn_accuracy_1' ... from p_psi."""
        found = {'accuracy': greedy_tokens(model, idx, device, batch_size)}
        if hasattr(model, 'dynamics'):  # the weights of p_psi
            parts = idx.to(device).split(batch_size)
            found['rnn_accuracy'] = torch.cat([recurrent_states(model, part).cpu() for part in parts])
        return {f'{name}_{t}': accuracy for name, states in found.items()
                for t, accuracy in enumerate((states == targets).double().mean(0).tolist(), 1)}


@torch.no_grad()
def recurrent_states(model, idx):
    """Return states (B, T) of idx (B, T): h_1 from the Transformer, h_t = p_psi(h_{t-1}, x_t)."""
    hidden = [model.final_hidden(idx[:, :1])[:, 0]]
    for x in idx[:, 1:].unbind(1):
        hidden.append(model.p_psi(hidden[-1], x))
    return model.head(torch.stack(hidden, 1))[..., :model.config.n_ids].argmax(-1)
