"""Errors printed as one sentence, file locks, and files written whole or not at all."""
import errno
import functools
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent


class UserError(ValueError):
    """Bad input. The message is a sentence: what was given, what was expected, what to do."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Exit with status 1 and a sentence at a UserError, a failure to read or write, or a lack of memory.

    Any other error is a bug and keeps its traceback.
    """
    program = Path(sys.argv[0]).name
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes again at exit
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        disk_is_full = getattr(error, 'errno', 0) == errno.ENOSPC
        sys.exit(f'{program}: {error}{": free some space and start again" if disk_is_full else ""}')
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate" not in str(error):
            raise
        sys.exit(f'{program}: not enough memory. Training: lower micro_batch_size or set checkpoint_blocks '
                 f'(context_ready: checkpoint_unrolls); sampling: give fewer or shorter prompts. {first_line(error)}')


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')


@functools.cache
def say_once(line: str) -> None:
    """Print a line to stderr, on rank 0 and the first time only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def command(*args) -> str:
    """Return a line for the user's shell that runs a script of the repository, or '-m' and a module, from here."""
    script, *rest = map(str, args)
    if script != '-m':
        return shlex.join(['python', os.path.relpath(ROOT / script), *rest])
    here = '' if Path.cwd() == ROOT else f'PYTHONPATH={shlex.quote(os.path.relpath(ROOT))} '
    return here + shlex.join(['python', script, *rest])


@contextmanager
def naming(path) -> Iterator[None]:
    """Name the path in an OSError that names none, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # errors of libraries may only have a text
            error.filename = str(path)
        raise


@contextmanager
def locked(folder, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. If another process holds it: UserError, or wait. The lock ends with its process."""
    path = Path(folder) / '.lock'  # never removed: a removed file could be locked twice
    lock = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
    except filelock.Timeout:
        raise UserError(f'{folder} is being written by {path.read_text() or "another process"}: wait until it ends, or '
                        'use another folder')
    except (OSError, NotImplementedError) as error:
        raise UserError(f'{folder} cannot be locked ({error}): use a folder on another disk, by --out_dir or, for '
                        'built-in data, the environment variable BUILT_DATA')
    try:
        with naming(folder):
            path.write_text(f'process {os.getpid()} on {platform.node()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
            yield
    finally:
        lock.release()


def sync(path) -> None:
    """Flush a file, or the renames in a folder, to the disk, so that they survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # CIFS and FUSE refuse folders
            raise
    finally:
        os.close(fd)


def write_file(path, content: bytes) -> None:
    """Write a file atomically: after a crash it is old or new. Raises OSError that names the file."""
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.writing')
    try:
        temporary.write_bytes(content)
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path))
    sync(path.parent)


def write_json(path, value) -> None:
    """Write a value as JSON, atomically."""
    write_file(path, json.dumps(value, indent=1).encode())


def read_json(path, remedy: str, check: Callable = lambda value: None) -> dict:
    """Return the dict in a JSON file; UserError that ends with the remedy if the file is damaged.

    check(value) raises ValueError for a dict that does not belong in this file.
    """
    try:
        value = json.loads(Path(path).read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f'it holds a {type(value).__name__} where an object is expected')
        check(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is damaged ({error}): {remedy}')
    return value


def sha256(path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with naming(path), open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
