"""Token data by name: built-in texts and tasks, one file each in this folder, data folders, and .txt files.

A file of this folder is built-in data if it has `build(folder)`, which writes shards (shards.py), or a dataclass
`Task`, whose rows are made when they are read (tasks.py).
"""
import hashlib
import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

if sys.argv[0] == '-m':  # as in python -m data.tokenizers, which runs this file first
    from common.start import quiet_start
    quiet_start()

from common.files import UserError
from data.shards import BUILT, VAL_SHARE, Data, write_data
from data.tasks import Generated, builtin_data, task_class


def open_data(name) -> Data | Generated:
    """Open data by name, by data folder, or by .txt file or folder; what needs building is built first, in seconds."""
    if task_class(name):
        return Generated(str(name))
    if not str(name):
        raise UserError(f'data is empty: expected built-in data ({", ".join(builtin_data())}) or a folder')
    folder, build = Path(name), None
    if name in builtin_data():
        folder, build = BUILT / name, importlib.import_module(f'data.{name}').build
    elif not (folder / 'meta.json').exists():
        from data.sources import text_files
        files = text_files(str(folder))
        if files:
            folder, build = text_data(folder, files)
    if not build and not (folder / 'meta.json').is_file():
        raise UserError(f'no data at {folder}: expected a .txt file, a folder with meta.json or with .txt '
                        f'files, or built-in data ({", ".join(builtin_data())})')
    if build and not folder.exists():
        print(f'building {folder} ...', flush=True)
        try:
            build(folder)
        except UserError:
            if not folder.exists():  # where it does, another process has built it meanwhile
                raise
    return Data(folder)


def has_data(name: str) -> bool:
    """Return True if the data exists or can be built when opened. A task may need a file, such as a city."""
    if task_class(name):
        return all(Path(file).exists() for file in re.findall(r'=([^,]+\.json)', name))
    return name in builtin_data() or not name or name.endswith('.txt') or Path(name).exists()


def text_data(path: Path, files: list[str]) -> tuple:
    """Return (the data folder of a .txt file or of a folder of them, the function that builds it).

    The folder's name depends on the texts.
    """
    from data.sources import fitting_share, local_files, open_source, with_splits
    identity = [[os.path.relpath(file, path), os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files]
    digest = hashlib.sha256(json.dumps([identity, VAL_SHARE]).encode()).hexdigest()
    s = SimpleNamespace(config=None, text_field='text', id_field=None, split_lines=False, val_share=VAL_SHARE,
                        val_hash='sha256', shuffle=0)

    def build(built):
        if local_files(str(path)) != files:
            raise UserError(f'{path} has records beside {len(files)} .txt: make a data folder of the records with '
                            f'python prepare_fineweb.py {path}, or give a folder of texts alone')
        from data.tokenizers import load_tokenizer  # imported here because that file can be run as a program too
        read, _ = open_source(str(path), s)
        found = with_splits(read(None), fitting_share(read, s), s.val_hash)
        write_data(built, load_tokenizer('byte'), (document for _, batch in found for document in batch))
    return BUILT / f'{path.resolve().name}-{digest[:12]}', build
