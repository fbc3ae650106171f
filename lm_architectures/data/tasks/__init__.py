"""Data by name: each file in this folder or in the folder OWN_TASKS is a text or a synthetic task.

A text has a function `documents()`, which yields (split, text). A task has a class `Task`, which
creates rows: see lm_architectures/data/generated.py.
"""
import importlib
import os
from pathlib import Path
from types import ModuleType

__path__ += filter(None, [os.environ.get('OWN_TASKS')])  # the user's folder, outside the repository


def builtin_data() -> list[str]:
    """Return the names of built-in data, and of the user's own."""
    return sorted({path.stem for folder in __path__ for path in Path(folder).glob('[a-z]*.py')})


def builtin_module(name: str) -> ModuleType:
    return importlib.import_module(f'{__name__}.{name}')


def task_class(name) -> type | None:
    """Return the Task class for a data name, or None if it is not a synthetic task."""
    kind = str(name).partition(':')[0]
    return getattr(builtin_module(kind), 'Task', None) if kind in builtin_data() else None
