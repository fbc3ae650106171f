"""Token data by name: built-in texts and tasks, data folders, and texts in files.

Texts are stored as data folders in data/built when they are first used. Delete such a folder after
editing the file in tasks/ that it was built from.
"""
import os
from collections.abc import Callable
from pathlib import Path

from lm_architectures.data.tasks import builtin_data, builtin_module, task_class
from lm_architectures.data.text.shards import BUILT, Data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.writing import VAL_FRACTION, write_data
from lm_architectures.files import MissingData, UserError, locked, remove


def open_data(name):
    """Open built-in data, a data folder, or a file or folder of texts. Builds it first if needed.

    Returns Data, Generated for a synthetic task, or Mixture. MissingData if there is none.
    """
    name = str(name)
    if name.startswith('mix:'):
        from lm_architectures.data.mixture import Mixture
        return Mixture(name, open_data)
    if task_class(name):
        from lm_architectures.data.generated import Generated
        return Generated(name)
    if name in builtin_data():
        return built(BUILT / name, builtin_module(name).documents)
    if os.path.exists(f'{name}/meta.json'):
        return Data(name)
    from lm_architectures.data.text.sources import Reading, Source, format_of
    from lm_architectures.data.text.splits import fitting_split, split_documents
    if not name or not os.path.exists(name):
        raise (UserError if not name or format_of(name) else MissingData)(
            f"no data at {name or 'an empty name'}: expected a .txt, .jsonl, .csv or .parquet file, a folder of such "
            f'files or with meta.json, or built-in data ({", ".join(builtin_data())}). prepare_fineweb.py reads more')
    source = Source(name, Reading(id_field=None, val_fraction=VAL_FRACTION))
    documents = lambda: (found for _, group in split_documents(source, *fitting_split(source)) for found in group)
    return built(BUILT / f'{Path(name).resolve().name}-{source.checksum[:12]}', documents)


def built(folder: Path, documents: Callable) -> Data:
    """Return the data folder of documents(), (split, text) each. Builds it first if needed."""
    if not folder.exists():
        with locked(BUILT, wait=True):
            for leftover in filter(Path.is_dir, BUILT.glob('.*.writing')):  # of killed processes
                remove(leftover)
            if not folder.exists():  # another process may have built it meanwhile
                print(f'building {folder} ...', flush=True)
                write_data(folder, load_tokenizer('byte'), documents())
    return Data(folder)
