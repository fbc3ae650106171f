"""Long documents of a run's validation data, for figures over the positions of a document."""
import itertools
from collections.abc import Iterator

import numpy as np

from common.files import UserError
from common.runs import read_run
from data.shards import Data

PIECE = 2 ** 20  # tokens that are read at a time


def fitting_block(runs: list[str], block_size: int) -> int:
    """Return block_size, or the windows of the runs if they are shorter, and print which."""
    shortest = min(read_run(run)['settings']['block_size'] for run in runs)
    if shortest < block_size:
        print(f'these runs read windows of {shortest} tokens, not {block_size}: documents are read to {shortest}')
    return min(block_size, shortest)


def long_documents(data, least: int, most: int, n: int) -> list[np.ndarray]:
    """Return the first n validation documents of at least `least` tokens, eos counted, cut to `most`, as int64 arrays.

    If the data has fewer, prints how many. Raises UserError if it has none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task, whose rows are no documents: give --data=FOLDER with documents')
    long_enough = (document[:most] for document in documents(data) if len(document) >= least)
    found = list(itertools.islice(long_enough, n))
    if not found:
        raise UserError(f'{data.folder} has no validation document of {least:,} tokens or more: give shorter lengths, '
                        'or --data=FOLDER with longer documents')
    if len(found) < n:
        print(f'{data.folder} has {len(found):,} validation documents of at least {least:,} tokens, not {n:,}')
    return found


def documents(data: Data) -> Iterator[np.ndarray]:
    """Yield the documents of the validation split in order, each with its eos."""
    total, rest = data.splits['val']['tokens'], np.zeros(0, np.int64)
    for start in range(0, total, PIECE):
        ids = np.concatenate([rest, data.tokens('val', start, min(PIECE, total - start))])
        *whole, rest = np.split(ids, np.flatnonzero(ids == data.eos_id) + 1)
        yield from whole
