"""Errors told to a person, and files that are old or new but never half of either."""
import errno
import hashlib
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch


class UserError(ValueError):
    """Bad input, told in a sentence to a person: what was given, what was expected, what to do."""


@contextmanager
def friendly_errors():
    """Ends the program with exit status 1 and a sentence instead of a traceback, where the cause is input, disk or memory."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        remedy = ': make room and start again, a training run with --resume' if getattr(error, 'errno', 0) == errno.ENOSPC else ''
        sys.exit(f'{Path(sys.argv[0]).name}: {error}{remedy}')
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f'{Path(sys.argv[0]).name}: too little memory. Training: lower micro_batch_size or set checkpoint_blocks '
                 '(context_ready: checkpoint_unrolls); sampling: '
                 f'give fewer or shorter prompts. {str(error).splitlines()[0]}')


def sync_folder(folder):
    """Makes renames in a folder last through a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, value):
    """Writes JSON so that the file is old or new, never half of either."""
    write_file(path, json.dumps(value, indent=1).encode())


def write_file(path, content):
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


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
