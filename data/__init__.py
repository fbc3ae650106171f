"""Token data by name: built-in texts and tasks (one file each here), data folders, .txt files.

Each file in this folder is built-in data if it has `documents()`, which yields (split, text), or a
dataclass `Task`, which generates rows on demand (tasks.py). The documents are stored in data/built
on first use: after editing the file, delete that folder.
"""
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from common.files import UserError, locked, remove
from data.shards import BUILT, Data
from data.tasks import Generated, builtin_data, task_class


def open_data(name) -> Data | Generated:
    """Open data by name, data folder, or .txt file or folder. Builds it first if needed."""
    if task_class(name):
        return Generated(str(name))
    expected = ('expected a .txt file, a folder with meta.json or only .txt files, or built-in data '
                f'({", ".join(builtin_data())}); prepare_fineweb.py converts other formats')
    if not str(name):
        raise UserError(f'data is empty: {expected}')
    folder, documents = Path(name), None
    if name in builtin_data():
        folder, documents = BUILT / name, importlib.import_module(f'data.{name}').documents()
    elif not (folder / 'meta.json').exists():
        folder, documents = text_data(folder)
        if not documents:
            raise UserError(f'no data at {folder}: {expected}')
    if documents and not folder.exists():
        with locked(BUILT, wait=True):
            for leftover in BUILT.glob('.*.????????'):  # of builders that were killed: others hold the lock
                remove(leftover)
            if not folder.exists():  # another process may have built it meanwhile
                print(f'building {folder} ...', flush=True)
                from data.tokenizers import load_tokenizer  # imported late: data.tokenizers can be run with -m
                from data.writing import write_data
                write_data(folder, load_tokenizer('byte'), documents)
    return Data(folder)


def has_data(name: str) -> bool:
    """Return True if the data exists or can be built when opened. A task may need a city file."""
    if task_class(name):
        return all(Path(file).exists() for file in re.findall(r'=([^,]+\.json)', name))
    return name in builtin_data() or not name or name.endswith('.txt') or Path(name).exists()


def text_data(path: Path) -> tuple[Path, Iterator | None]:
    """Return (data folder, documents) for a .txt file or a folder of them, else (path, None).

    The folder's name depends on the names, sizes and mtimes of the files.
    """
    from data import sources
    found = [str(path)] if path.is_file() else sources.visible_files(str(path))
    files = [file for file in found if sources.format_of(file)]
    if {*map(sources.format_of, files)} != {'txt'}:
        return path, None

    def documents():
        s, (read, _) = sources.TEXTS, sources.open_source(str(path), sources.TEXTS)
        for _, batch in sources.with_splits(read(None), *sources.fitting_share(read, s), s.val_hash):
            yield from batch
    return BUILT / f'{path.resolve().name}-{sources.checksum_of_files(files)[:12]}', documents()
