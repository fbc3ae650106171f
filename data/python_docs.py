"""The documentation inside this Python installation: a corpus that needs no download.

One document per language-reference topic (what `help('for')` prints) and per docstring of the standard library's source
files. About 1.8 million bytes, English with some code. The exact text, and so the exact loss, depends on the Python
version.
"""
import ast
import inspect
import sysconfig
from pathlib import Path

from data.shards import split_of, write_data
from data.tokenizers import load_tokenizer

LEFT_OUT = ('test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'lib2to3')
MIN_CHARACTERS = 80  # shorter docstrings repeat the name of their function


def build(folder):
    """Build the data folder: byte tokens, deduplicated, split by a hash of each document's text."""
    unique = dict.fromkeys(documents())
    write_data(folder, load_tokenizer('byte'), ((split_of(text), text) for text in unique))


def documents():
    """Yield the texts, always in the same order."""
    from pydoc_data.topics import topics
    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()['stdlib'])
    for path in sorted(library.rglob('*.py')):
        if any(part in LEFT_OUT for part in path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file that is broken on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = inspect.cleandoc(ast.get_docstring(node, clean=False) or '')
                if len(text) >= MIN_CHARACTERS:
                    yield text.encode(errors='replace').decode()
