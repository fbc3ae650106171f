"""Built-in data by name: the files in tasks/."""
import importlib
from pathlib import Path
from types import ModuleType

from lm_architectures.files import UserError


class MissingData(UserError):
    """There are no data of that name, but a command may build them."""


def builtin_data() -> list[str]:
    """Return the names of built-in data: files in tasks/, each with `documents` or `Task`."""
    return sorted(path.stem for path in (Path(__file__).parent / 'tasks').glob('[a-z]*.py'))


def builtin_module(name: str) -> ModuleType:
    return importlib.import_module(f'lm_architectures.data.tasks.{name}')


def task_class(name) -> type | None:
    """Return the Task class for a data name, or None if it is not a synthetic task."""
    kind = str(name).partition(':')[0]
    return getattr(builtin_module(kind), 'Task', None) if kind in builtin_data() else None
