"""Long documents of a run's validation data, for figures over the positions of a document."""
import numpy as np

from common.files import UserError
from common.runs import read_run
from data.shards import Data


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
    ids = data.tokens('val', 0, data.splits['val']['tokens'])
    *documents, _ = np.split(ids, np.flatnonzero(ids == data.eos_id) + 1)  # each with its eos
    found = [document[:most] for document in documents if len(document) >= least][:n]
    if not found:
        raise UserError(f'{data.folder} has no validation document of {least:,} tokens or more: give shorter lengths, '
                        'or --data=FOLDER with longer documents')
    if len(found) < n:
        print(f'{data.folder} has {len(found):,} validation documents of at least {least:,} tokens, not {n:,}')
    return found
