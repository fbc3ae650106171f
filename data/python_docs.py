"""The documentation inside this Python installation: a corpus that needs no download.

One document per language-reference topic (what `help('for')` prints) and per docstring of the standard library's source
files. About 1.8 million bytes, English with some code. The exact text, and so the exact loss, depends on the Python
version.
"""
import ast
import sysconfig
from pathlib import Path

from data.sources import split_of

LEFT_OUT = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'lib2to3'}
MIN_CHARACTERS = 80  # shorter docstrings repeat the name of their function


def documents():
    """Yield (split, text), deduplicated, always in the same order; a hash of the text decides about the split."""
    for text in dict.fromkeys(texts()):
        yield split_of(text), text


def texts():
    from pydoc_data.topics import topics
    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()['stdlib'])
    for path in sorted(library.rglob('*.py')):
        if LEFT_OUT.intersection(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file that is broken on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ''
                if len(text) >= MIN_CHARACTERS:
                    yield text.encode(errors='replace').decode()
