"""One-sentence error messages, file locks, and atomic file writes."""
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
    """Invalid input. The message states what was given, what was expected and what to do."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Exit with status 1 and one sentence on UserError, OSError or lack of memory.

    Any other error is a bug and keeps its traceback.
    """
    program = Path(sys.argv[0]).name
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python flushes again at exit
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        disk_is_full = getattr(error, 'errno', 0) == errno.ENOSPC
        sys.exit(f'{program}: {error}{": free some space and start again" if disk_is_full else ""}')
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate" not in str(error):
            raise
        sys.exit(f'{program}: out of memory. For training, lower --micro_batch_size or set --checkpoint_blocks '
                 f'(context_ready: --checkpoint_unrolls); for sampling, shorten the prompts. {first_line(error)}')


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')


@functools.cache
def warn_once(line: str) -> None:
    """Print a line to stderr, only on rank 0 and only the first time."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def command(*args) -> str:
    """Return a shell command that runs a script, or '-m' and a module, from the current folder."""
    script, *rest = map(str, args)
    if script != '-m':
        return shlex.join(['python', os.path.relpath(ROOT / script), *rest])
    here = '' if Path.cwd() == ROOT else f'PYTHONPATH={shlex.quote(os.path.relpath(ROOT))} '
    return here + shlex.join(['python', script, *rest])


@contextmanager
def add_path_to_errors(path) -> Iterator[None]:
    """Add the path to an OSError that names no file, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # library errors may only have a message
            error.filename = str(path)
        raise


@contextmanager
def locked(folder, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. If it is taken, raise UserError, or wait if `wait`."""
    path = Path(folder) / '.lock'  # never deleted, because two processes could then both hold the lock
    lock = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
    except filelock.Timeout:
        raise UserError(f'{folder} is being written by {path.read_text() or "another process"}: wait until it exits, '
                        'or use another folder')
    except (OSError, NotImplementedError) as error:
        raise UserError(f'{folder} cannot be locked ({error}): use a folder on another disk, with --out_dir or, for '
                        'built-in data, the environment variable BUILT_DATA')
    try:
        with add_path_to_errors(folder):
            path.write_text(f'process {os.getpid()} on {platform.node()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
            yield
    finally:
        lock.release()


def sync(path) -> None:
    """Flush a file, or renames in a folder, to disk, so that they survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with add_path_to_errors(path):
            os.fsync(fd)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # CIFS, FUSE: not supported
            raise
    finally:
        os.close(fd)


def write_file(path, content: bytes) -> None:
    """Write a file atomically: after a crash it is either old or new. An OSError names the file."""
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
    """Return the dict in a JSON file. UserError with `remedy` if the file is damaged.

    check(value) raises ValueError if the dict has the wrong content.
    """
    try:
        value = json.loads(Path(path).read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f'expected a JSON object, got {type(value).__name__}')
        check(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is damaged ({error}): {remedy}')
    return value


def sha256(path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with add_path_to_errors(path), open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
