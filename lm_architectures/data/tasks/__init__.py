"""Built-in data: each file in this folder is a text or a synthetic task, found by its name.

A text has a function `documents()`, which yields (split, text). A task has a class `Task`, which
creates rows: see lm_architectures/data/generated.py.
"""
import importlib
from pathlib import Path
from types import ModuleType


def builtin_data() -> list[str]:
    """Return the names of built-in data."""
    return sorted(path.stem for path in Path(__file__).parent.glob('[a-z]*.py'))


def builtin_module(name: str) -> ModuleType:
    return importlib.import_module(f'{__name__}.{name}')


def task_class(name) -> type | None:
    """Return the Task class for a data name, or None if it is not a synthetic task."""
    kind = str(name).partition(':')[0]
    return getattr(builtin_module(kind), 'Task', None) if kind in builtin_data() else None
