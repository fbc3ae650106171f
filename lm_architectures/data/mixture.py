"""A mixture of texts: --data=mix:python_docs=0.7,own.jsonl=0.3."""
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lm_architectures.data.text.shards import shuffled
from lm_architectures.data.text.tokenizers import tokenizer_digest
from lm_architectures.files import UserError
from lm_architectures.settings import Text, typed

BLOCK = 1000  # rows in which each source has its share


class Mixture:
    """Rows of several texts, with the members that any data object needs.

    train_batch, val_batch, n_rows, verify; tokenizer, n_ids, eos_id, bos; folder (its name), sha256
    example(T, n)   a prompt, and how many tokens to generate after it, at most n
    sources         {name: (share, data)}; other data is its only source, {name: (1.0, self)}, and
                    has splits = {'train': {'tokens', 'documents', 'bytes'}, 'val': ...}
    T               None, or the length of a task's rows, which score(model, device, batch_size)
                    scores: {name: score}

    Each row is from one source. Every block of rows has the sources in their shares, in an order of
    its own. Each source has its own order and epochs.
    """

    def __init__(self, name: str, open_data: Callable):
        """Open the sources of 'mix:SOURCE=WEIGHT,SOURCE=WEIGHT,...' with open_data."""
        paths, _, weights = zip(*(part.rpartition('=') for part in name.removeprefix('mix:').split(',')))
        weights = [typed(f'the weight of {path!r}', Text(weight), float, f'in data {name!r} (mix:SOURCE=WEIGHT,...)')
                   for path, weight in zip(paths, weights)]
        self.ends = np.rint(np.cumsum(weights) / (sum(weights) or 1) * BLOCK).astype(np.int64)
        self.quotas = np.diff(self.ends, prepend=0)  # rows of each source in a block
        if len({*paths}) < len(paths) or min(self.quotas) < 1:
            raise UserError(f'data is {name!r}: expected different sources, each with a weight of at least '
                            f'{1 / BLOCK:.1%} of their sum')
        self.datas = [open_data(os.path.expanduser(path)) for path in paths]
        for data in self.datas:
            vocabularies = [(tokenizer_digest(d.tokenizer), d.n_ids, d.eos_id, d.bos) for d in (self.datas[0], data)]
            if data.T or isinstance(data, Mixture) or vocabularies[0] != vocabularies[1]:
                raise UserError(f'{data.folder} has tokenizer {data.tokenizer}, {paths[0]} has '
                                f'{self.datas[0].tokenizer}: a mixture needs texts with the same tokenizer and --bos '
                                '(prepare_fineweb.py)')
        self.tokenizer, self.n_ids, self.eos_id, self.bos = data.tokenizer, data.n_ids, data.eos_id, data.bos
        names, shares = [Path(path).name for path in paths], (self.quotas / BLOCK).tolist()
        names = paths if len({*names}) < len(names) else names
        self.sources, self.T = dict(zip(names, zip(shares, self.datas))), None
        self.folder = 'mix:' + ','.join(f'{path}={share:g}' for path, share in zip(paths, shares))
        self.example = self.datas[0].example
        self.sha256 = hashlib.sha256(repr([shares, [data.sha256 for data in self.datas]]).encode()).hexdigest()

    def verify(self) -> None:
        for data in self.datas:
            data.verify()

    def n_rows(self, split: str, T: int) -> int:
        return sum(data.n_rows(split, T) for data in self.datas)

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        """Return idx, targets (n, T) int64, a pure function of the arguments. -1 does not count."""
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)[part]
        return self._batch(numbers, seed, lambda data, n: data.train_batch(n, 1, T, seed))

    def val_batch(self, numbers, T: int, seed: int | None = None) -> tuple:
        """Return idx, targets (len(numbers), T) int64 of validation rows in the shares."""
        return self._batch(np.asarray(numbers), 0, lambda data, n: data.val_batch([n % data.n_rows('val', T)], T, seed))

    def _batch(self, numbers: np.ndarray, seed: int, read: Callable) -> tuple:
        """Return the rows with these numbers as read(source, number of a row in the source)."""
        places, _ = shuffled(numbers, BLOCK, seed)  # in its block, where each source has a range
        chosen = np.searchsorted(self.ends, places, side='right')
        rows = numbers // BLOCK * self.quotas[chosen] + places - (self.ends - self.quotas)[chosen]
        return tuple(map(torch.cat, zip(*(read(self.datas[i], n) for i, n in zip(chosen, rows.tolist())))))
