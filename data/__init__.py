"""Token data by name: built-in texts and tasks (one file each here), data folders, texts in files.

Each file in this folder is built-in data if it has `documents()`, which yields (split, text), or a
dataclass `Task`, which generates rows on demand (tasks.py). The documents are stored in data/built
on first use: after editing the file, delete that folder.
"""
import importlib
from collections.abc import Iterator
from pathlib import Path

from common.files import UserError, locked
from data.names import builtin_data, task_class
from data.shards import BUILT, Data


def open_data(name):
    """Open data by name, data folder, or file or folder of texts. Builds it first if needed.

    Returns Data, or Generated for a synthetic task. FileNotFoundError if there is none.
    """
    if task_class(name):
        from data.tasks import Generated
        return Generated(str(name))
    expected = ('expected a .txt, .jsonl, .csv or .parquet file, a folder with meta.json or of such files, or built-in '
                f'data ({", ".join(builtin_data())}); prepare_fineweb.py converts other formats')
    if not str(name):
        raise UserError(f'data is empty: {expected}')
    folder, documents = Path(name), None
    if name in builtin_data():
        folder, documents = BUILT / name, importlib.import_module(f'data.{name}').documents()
    elif not (folder / 'meta.json').exists():
        folder, documents = text_data(folder)
        if not documents:
            raise FileNotFoundError(f'no data at {folder}: {expected}')
    if documents and not folder.exists():
        with locked(BUILT, wait=True):
            if not folder.exists():  # another process may have built it meanwhile
                print(f'building {folder} ...', flush=True)
                from data.tokenizers import load_tokenizer
                from data.writing import write_data
                write_data(folder, load_tokenizer('byte'), documents)
    return Data(folder)


def text_data(path: Path) -> tuple[Path, Iterator | None]:
    """Return (data folder, documents) for a file or folder of texts, else (path, None).

    Records have their text in the field `text`. The folder's name depends on the names, sizes and
    mtimes of the files.
    """
    from data import sources
    from data.writing import VAL_FRACTION
    found = [str(path)] if path.is_file() else sources.visible_files(str(path))
    if not any(map(sources.format_of, found)):
        return path, None
    source = sources.Source(str(path), sources.Reading(id_field=None, val_fraction=VAL_FRACTION))

    def documents():
        for _, found in sources.split_documents(source, *sources.fitting_split(source)):
            if found:  # a record with text
                yield found
    return BUILT / f'{path.resolve().name}-{source.checksum[:12]}', documents()
