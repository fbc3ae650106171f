"""The copies of the model's code in a run: import them, and compare them with today's files."""
import hashlib
import importlib
import sys
import tokenize
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from attn_kernels import digest
from lm_architectures.files import UserError, first_line, warn_once


class FromText(SourceFileLoader):
    """Loads a module from its text, never from a compiled file, which nobody can read."""

    def get_code(self, fullname):
        return compile(self.get_data(self.path), self.path, 'exec')


def import_copy(path: Path) -> ModuleType:
    """Import a run's copy of a model's file, as a module of a package."""
    folder = str(path.parent.absolute())
    package = f'code_{hashlib.sha256(folder.encode()).hexdigest()[:8]}'
    texts = {file: file.read_bytes() for file in path.parent.glob('*.py')}
    if package in sys.modules and vars(sys.modules[package])['__texts__'] != texts:  # another run is in the folder now
        for name in [name for name in sys.modules if name.partition('.')[0] == package]:
            del sys.modules[name]
    if package not in sys.modules:
        sys.path_importer_cache[folder] = FileFinder(folder, (FromText, ['.py']))
        module = sys.modules[package] = ModuleType(package)
        module.__path__, module.__texts__ = [folder], texts
    try:
        return importlib.import_module(f'{package}.{path.stem}')
    except Exception as error:
        raise UserError(f'{path} cannot be imported ({type(error).__name__}: {first_line(error)})')


def edited_files(code: dict[str, tuple[Path, str]], stored: Path) -> list[str]:
    """Return the files of `code_of` that differ from the copies in a folder. Comments do not count.

    Prints a line for each, with both paths.
    """
    edited = []
    for name, (path, text) in code.items():
        copy = stored / name
        old = copy.read_text(encoding='utf-8', errors='replace') if copy.is_file() else ''
        if old != text and code_digest(old) != code_digest(text):
            edited.append(str(path))
            warn_once(f'{path} differs from {copy}, with which this run was started: train.py, sample.py, eval.py and '
                      'lm_architectures.hf.export use that copy with --code=run')
    return edited


def code_digest(text: str) -> str:
    """Return the `digest` of a text, or the text if it is not Python."""
    try:
        return digest(text)
    except (SyntaxError, tokenize.TokenError):
        return text
