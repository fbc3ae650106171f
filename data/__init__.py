"""Token data by name: built-in texts and tasks, one file each in this folder, data folders, and folders of .txt files.

A file of this folder is built-in data if it has `build(folder)`, which writes shards (shards.py), or a dataclass
`Task`, whose rows are made when they are read (tasks.py).
"""
import hashlib
import importlib
import json
import sys
from pathlib import Path

if sys.argv[0] == '-m':  # as in python -m data.pointer_chasing, which runs this file first
    from common.start import quiet_start
    quiet_start()

from common.files import UserError
from data.shards import BUILT, PIECE, VAL_SHARE, Data, split_of, text_documents, write_data
from data.tasks import Generated, builtin_data, task_class
from data.tokenizers import load_tokenizer


def open_data(name) -> Data | Generated:
    """Data by name, by data folder, or by a folder of .txt files. Builds what is not there yet, which takes seconds."""
    if task_class(name):
        return Generated(str(name))
    if not str(name):
        raise UserError(f'data is empty: expected built-in data ({", ".join(builtin_data())}) or a folder')
    folder, build = Path(name), None
    if name in builtin_data():
        folder, build = BUILT / name, importlib.import_module(f'data.{name}').build
    elif not (folder / 'meta.json').exists():
        paths = sorted(path for path in folder.rglob('*.txt') if path.is_file())
        if paths:
            folder, build = text_folder(folder, paths)
    if not build and not (folder / 'meta.json').is_file():
        raise UserError(f'no data at {folder}: expected a folder with meta.json or with .txt files, '
                        f'or built-in data ({", ".join(builtin_data())})')
    if build and not folder.exists():
        print(f'building {folder} ...', flush=True)
        build(folder)
    return Data(folder)


def text_folder(folder: Path, paths: list[Path]) -> tuple:
    """(the data folder of a folder of texts, the function that builds it). Other texts are another data folder."""
    files = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.sha256(json.dumps([files, PIECE, VAL_SHARE]).encode()).hexdigest()

    def build(built):
        write_data(built, load_tokenizer('byte'), ((split_of(text), text) for text in text_documents(paths)))
    return BUILT / f'{folder.resolve().name}-{digest[:12]}', build
