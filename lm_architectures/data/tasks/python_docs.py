"""Documentation of this Python installation: a corpus that needs no download.

One document per language-reference topic (what `help('for')` prints) and per standard-library
module: its docstrings, in file order. About 2.0 million bytes, English with some code. The text,
and so the loss, depends on the Python version.
"""
import ast
import sysconfig
from pathlib import Path

from lm_architectures.data.text.writing import split_of
from lm_architectures.files import without_surrogates

SKIPPED_FOLDERS = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'lib2to3'}
WITH_DOCSTRING = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def documents():
    """Return [(split, text)], deduplicated and in order. A hash of the text chooses the split."""
    return [(split_of(text), text) for text in dict.fromkeys(texts())]


def texts():
    """Yield the help topics, and for each module its docstrings, in file order."""
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
        nodes = [node for node in ast.walk(tree) if isinstance(node, WITH_DOCSTRING)]
        docs = [ast.get_docstring(node) or '' for node in sorted(nodes, key=lambda node: getattr(node, 'lineno', 0))]
        if text := '\n\n'.join(doc for doc in docs if len(doc) >= 80):  # shorter ones only repeat the function name
            yield without_surrogates(text)
