"""Documentation of this Python installation: a corpus that needs no download.

One document per language-reference topic (what `help('for')` prints) and per standard-library
module: its docstrings, in file order. About 2.0 million bytes, English with some code. The text,
and so the loss, depends on the Python version.
"""
import ast
import sysconfig
from pathlib import Path

from lm_architectures.data.text.splits import split_of
from lm_architectures.files import without_surrogates

SKIPPED_FOLDERS = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'lib2to3'}
MIN_CHARACTERS = 80  # shorter docstrings only repeat the function name


def documents():
    """Yield (split, text), deduplicated, in a fixed order; a hash of the text chooses the split."""
    for text in dict.fromkeys(texts()):
        yield split_of(text), text


def texts():
    from pydoc_data.topics import topics
    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()['stdlib'])
    for path in sorted(library.rglob('*.py')):
        if SKIPPED_FOLDERS.intersection(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # broken on purpose, for tests
            continue
        text = '\n\n'.join(doc for doc in docstrings(tree) if len(doc) >= MIN_CHARACTERS)
        if text:
            yield without_surrogates(text)


def docstrings(node):
    """Yield the docstrings of a module, class or function and everything inside, in file order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ''
    for child in ast.iter_child_nodes(node):
        yield from docstrings(child)
