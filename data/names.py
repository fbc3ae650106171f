"""Which files of this folder are built-in data, and which of those are tasks."""
import importlib
from pathlib import Path

from common.files import UserError

# the other files
NOT_DATA = {'names', 'shards', 'sources', 'tasks', 'tokenizer_files', 'tokenizers', 'train_tokenizer', 'writing'}


class MissingData(UserError):
    """There are no data of that name, but a command may build them."""


def builtin_data() -> list[str]:
    """Return the names of built-in data: files in this folder with `documents` or `Task`."""
    return sorted({path.stem for path in Path(__file__).parent.glob('[a-z]*.py')} - NOT_DATA)


def task_class(name) -> type | None:
    """Return the Task class for a data name, or None if it is not a synthetic task."""
    kind = str(name).partition(':')[0]
    return getattr(importlib.import_module(f'data.{kind}'), 'Task', None) if kind in builtin_data() else None
