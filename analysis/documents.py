"""Long documents of a run's validation data, for figures over the positions of a document."""
from collections.abc import Iterator

import numpy as np

from common.files import UserError
from common.runs import read_run
from data.shards import Data

PIECE = 2 ** 20  # tokens that are read at a time


def fitting_block(runs: list[str], block_size: int) -> int:
    """block_size, or the windows of the runs where these are shorter, with a line that says so."""
    shortest = min(read_run(run)['settings']['block_size'] for run in runs)
    if shortest < block_size:
        print(f'these runs read windows of {shortest} tokens, not {block_size}: documents are read to {shortest}')
    return min(block_size, shortest)


def long_documents(data, least: int, most: int, n: int) -> list[np.ndarray]:
    """The first n validation documents of at least `least` tokens, eos counted, cut to `most`: int64 (length,) each.

    Fewer, and a line that says so, where the data has no more. Raises UserError where it has none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task, whose rows are no documents: give --data=FOLDER with documents')
    found, longest = [], 0
    for document in documents(data):
        longest = max(longest, len(document))
        if len(document) >= least:
            found.append(document[:most])
        if len(found) == n:
            return found
    if not found:
        raise UserError(f'the longest validation document of {data.folder} has {longest:,} tokens: expected some of '
                        f'{least:,} or more. Give shorter lengths, or --data=FOLDER with longer documents')
    print(f'{data.folder} has {len(found):,} validation documents of at least {least:,} tokens, not {n:,}: these are '
          'used')
    return found


def documents(data: Data) -> Iterator[np.ndarray]:
    """The documents of the validation split in order, each with its eos."""
    total, rest = data.splits['val']['tokens'], np.zeros(0, np.int64)
    for start in range(0, total, PIECE):
        ids = np.concatenate([rest, data.tokens('val', start, min(PIECE, total - start))])
        *whole, rest = np.split(ids, np.flatnonzero(ids == data.eos_id) + 1)
        yield from whole
