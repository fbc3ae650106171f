"""Token data by name: built-in texts and tasks, one file each in this folder, data folders, and folders of .txt files."""
import hashlib
import importlib
import json
from pathlib import Path

from common.files import UserError
from data.shards import BUILT, PIECE, VAL_SHARE, Data, split_of, text_documents, write_data
from data.tasks import Generated, builtin_data, task_class
from data.tokenizers import load_tokenizer


def open_data(name):
    """Data by name, by data folder, or by a folder of .txt files. What is not built yet is built, which takes seconds."""
    folder, build = Path(name), None
    if task_class(name):
        return Generated(str(name))
    if name in builtin_data():
        folder, build = BUILT / name, importlib.import_module(f'data.{name}').build
    elif not (folder / 'meta.json').exists() and (paths := sorted(p for p in folder.rglob('*.txt') if p.is_file())):
        files = [(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
        folder = BUILT / f'{folder.resolve().name}-{hashlib.sha256(json.dumps([files, PIECE, VAL_SHARE]).encode()).hexdigest()[:12]}'
        build = lambda folder: write_data(folder, load_tokenizer('byte'), ((split_of(text), text) for text in text_documents(paths)))
    if not build and not (folder / 'meta.json').is_file():
        raise UserError(f'no data at {folder}: expected a folder with meta.json or with .txt files, '
                        f'or built-in data ({", ".join(builtin_data())})')
    if build and not folder.exists():
        print(f'building {folder} ...', flush=True)
        build(folder)
    return Data(folder)
