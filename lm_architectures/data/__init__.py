"""Token data by name: built-in texts and tasks (one file each in tasks/), data folders, texts in files.

Each file in tasks/ is built-in data: it has `documents()`, which yields (split, text), or a
dataclass `Task`, which generates rows on demand (generated.py). The documents are stored in data/built
on first use: after editing the file, delete that folder.
"""
from pathlib import Path

from lm_architectures.data.names import MissingData, builtin_data, builtin_module, task_class
from lm_architectures.data.text.shards import BUILT, Data
from lm_architectures.files import UserError, locked, remove


def open_data(name):
    """Open data by name, data folder, or file or folder of texts. Builds it first if needed.

    Returns Data, or Generated for a synthetic task. MissingData if there is none.
    """
    if task_class(name):
        from lm_architectures.data.generated import Generated
        return Generated(str(name))
    expected = ('expected a .txt, .jsonl, .csv or .parquet file, a folder with meta.json or of such files, or built-in '
                f'data ({", ".join(builtin_data())}). Rename other plain text to .txt; prepare_fineweb.py reads more')
    if not str(name):
        raise UserError(f'data is empty: {expected}')
    folder, documents = Path(name), None
    if name in builtin_data():
        folder, documents = BUILT / name, builtin_module(name).documents()
    elif not (folder / 'meta.json').exists():
        from lm_architectures.data.text.sources import format_of, texts_as_data
        if not (found := texts_as_data(folder)):
            is_wrong = folder.exists() or format_of(str(name))  # not a name of data to come
            raise (UserError if is_wrong else MissingData)(f'no data at {folder}: {expected}')
        folder, documents = BUILT / found[0], found[1]
    if documents and not folder.exists():
        with locked(BUILT, wait=True):
            for leftover in filter(Path.is_dir, BUILT.glob('.*.writing')):  # of killed processes
                remove(leftover)
            if not folder.exists():  # another process may have built it meanwhile
                print(f'building {folder} ...', flush=True)
                from lm_architectures.data.text.tokenizers import load_tokenizer
                from lm_architectures.data.text.writing import write_data
                write_data(folder, load_tokenizer('byte'), documents)
    return Data(folder)
