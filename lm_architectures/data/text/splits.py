"""Which documents of a source are validation data.

A hash decides: of a document's id, or of its text if there are no ids or all are equal. Of a single
text, the end is validation data. A fraction that would leave too few documents is raised.
"""
import bisect
import math
from collections.abc import Iterator

from lm_architectures.data.text.writing import hash_fraction, split_of

MIN_VAL_DOCUMENTS = 10  # minimum number of validation documents; below 200 documents, 5% of them
TAIL = 0.1  # least fraction of a single text that is validation data, as in nanoGPT


def split_documents(source, val_fraction: float, by: str, state: list | None = None) -> Iterator[tuple]:
    """Yield (next state, [(split, text)]) of a Source, [] for a record without text.

    by: 'id' or 'text', whose hash decides, or 'tail' for a single text.
    """
    for next_state, found in source.documents(state):
        key, text = found or (None, None)
        if found is None:
            parts = []
        elif by == 'tail':
            cut = int(len(text) * (1 - val_fraction))
            parts = [('train', text[:cut]), ('val', text[cut:])]
        else:
            parts = [(split_of(text if by == 'text' else key, val_fraction, source.s.val_hash), text)]
        yield next_state, parts


def fitting_split(source, max_tokens: int | None = None) -> tuple[float, str]:
    """Return (val_fraction, by) for `split_documents`, and print changes from the settings.

    Raises val_fraction to leave MIN_VAL_DOCUMENTS. Stops reading after enough documents or
    max_tokens bytes, because a document rarely has more tokens than bytes.
    """
    s, ids, texts, n_val, n_bytes = source.s, [], [], 0, 0  # the hashes of all ids, and of all texts
    for key, text in (found for _, found in source.documents() if found):
        ids.append(hash_fraction(key, s.val_hash))
        texts.append(hash_fraction(text, s.val_hash))
        n_val += ids[-1] < s.val_fraction
        n_bytes += len(text.encode()) + 1
        is_read = max_tokens and n_bytes >= max_tokens and len(ids) > 1
        if is_read or n_val >= MIN_VAL_DOCUMENTS and ids[-1] != ids[0]:
            break
    else:
        if len(ids) == 1:
            tail = max(TAIL, s.val_fraction)
            print(f'single text: its last {tail:.0%} are the validation data', flush=True)
            return tail, 'tail'
    n, n_ids = len(ids), len(set(ids))
    by = 'text' if n_ids == 1 < n else 'id'
    if n_ids < n and texts != ids:
        print(f'repeated ids: {n:,} documents have {n_ids:,} in field {s.id_field!r}; '
              + ('splitting by text instead' if by == 'text' else
                 'documents with the same id are in the same split (--id_field=None: split by text)'), flush=True)
    hashes = sorted(texts if by == 'text' else ids)
    n_val, enough = bisect.bisect_left(hashes, s.val_fraction), min(MIN_VAL_DOCUMENTS, max(1, n // 20))
    if n_val >= enough:
        return s.val_fraction, by
    val_fraction = math.nextafter(hashes[enough - 1], 1)
    print(f'val_fraction = {s.val_fraction:g} leaves {n_val} of {n:,} documents for validation: raised to '
          f'{val_fraction:.2g}, which leaves {bisect.bisect_left(hashes, val_fraction):,}', flush=True)
    return val_fraction, by
