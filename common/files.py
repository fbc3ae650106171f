"""Errors told to a person, and files that are old or new but never half of either."""
import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class UserError(ValueError):
    """Bad input, told in a sentence to a person: what was given, what was expected, what to do."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Ends the program with exit status 1 and a sentence, not a traceback, where the cause is input, disk or memory."""
    program = Path(sys.argv[0]).name
    try:
        yield
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        disk_is_full = getattr(error, 'errno', 0) == errno.ENOSPC
        remedy = ': make room and start again, a training run with --resume' if disk_is_full else ''
        sys.exit(f'{program}: {error}{remedy}')
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f'{program}: too little memory. Training: lower micro_batch_size or set checkpoint_blocks '
                 '(context_ready: checkpoint_unrolls); sampling: give fewer or shorter prompts. '
                 f'{str(error).splitlines()[0]}')


def sync_folder(folder) -> None:
    """Makes renames in a folder last through a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path, content: bytes) -> None:
    """Writes bytes so that the file is old or new, never half of either. Raises OSError that names the file."""
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.writing')
    try:
        with open(temporary, 'wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path))
    sync_folder(path.parent)


def write_json(path, value) -> None:
    """`write_file` of a value as JSON."""
    write_file(path, json.dumps(value, indent=1).encode())


def sha256(path) -> str:
    """The checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
