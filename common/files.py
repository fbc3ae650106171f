"""Errors told to a person, and files that are old or new but never half of either."""
import errno
import functools
import hashlib
import json
import os
import platform
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
import torch

ROOT = Path(__file__).resolve().parent.parent


class UserError(ValueError):
    """Bad input, told in a sentence to a person: what was given, what was expected, what to do."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Ends the program with exit status 1 and a sentence, not a traceback.

    An error that no UserError foresaw, as an edit of a model file may bring, names the place in this repository where
    it came up. With TRACEBACK=1 in the environment it shows the whole way there.
    """
    program = Path(sys.argv[0]).name
    with interruptible():
        try:
            try:
                yield
            finally:
                flush_output()
        except BrokenPipeError:  # whoever read the output has enough
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        except (UserError, OSError) as error:
            disk_is_full = getattr(error, 'errno', 0) == errno.ENOSPC
            remedy = ': make room and start again, a training run with --resume' if disk_is_full else ''
            sys.exit(f'{program}: {error}{remedy}')
        except Exception as error:
            if os.environ.get('TRACEBACK') == '1':
                raise
            is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate" in str(error)
            sys.exit(f'{program}: {too_little_memory(error) if is_memory else unforeseen(error)}')


def flush_output() -> None:
    """Flushes stdout. Where that fails, what is left goes nowhere, or the end of the program would try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, which it does not while a program imports (common/start.py) or ends."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def too_little_memory(error: Exception) -> str:
    return ('too little memory. Training: lower micro_batch_size or set checkpoint_blocks (context_ready: '
            f'checkpoint_unrolls); sampling: give fewer or shorter prompts. {first_line(error)}')


def unforeseen(error: Exception) -> str:
    """A sentence for an error that is none of ours: what, and the last place in this repository that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(ROOT) and 'site-packages' not in f.filename]
    place = (own or frames)[-1]
    file = os.path.relpath(place.filename, ROOT) if own else place.filename
    return (f'{type(error).__name__}: {first_line(error)}\n  at {file}, line {place.lineno}, in {place.name}: '
            f'{place.line}\n  TRACEBACK=1 before the command shows the whole way there')


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')


@functools.cache
def say_once(line: str) -> None:
    """A line on stderr, the first time only; of several processes the first says it."""
    if os.environ.get('RANK', '0') == '0':
        print(line, file=sys.stderr, flush=True)


@contextmanager
def locked(folder) -> Iterator[None]:
    """Holds the lock of a folder: a UserError if another process has it. It is free when its holder ends, however."""
    path = Path(folder) / '.lock'  # it stays: one that is removed could be held twice
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = ''
        with suppress(OSError):
            holder = path.read_text(errors='replace')
        raise UserError(f'{folder} is being written by {holder or "another process"}: wait until it ends, or use '
                        'another folder')
    try:
        with suppress(PermissionError):  # on Windows a lock is on the content too
            path.write_text(f'process {os.getpid()} on {platform.node()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
        yield
    finally:
        lock.release()


def sync_folder(folder) -> None:
    """Makes renames in a folder last through a power failure."""
    if not hasattr(os, 'O_DIRECTORY'):  # Windows opens no folders
        return
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


def checked_json(value: dict) -> dict:
    """A dict for `write_json`, with the checksum that `read_json` compares as its first key. All keys are strings."""
    canonical = json.dumps(value, sort_keys=True)
    return {'crc32': f'{zlib.crc32(canonical.encode()):08x}', **value}


def read_json(path, remedy: str, check: Callable = lambda value: None) -> dict:
    """The dict of a JSON file, without its checksum, which files of older code have not.

    check(value) raises ValueError for a dict that is no such file's. Raises UserError, which ends with the remedy, if
    the file is damaged.
    """
    try:
        value = json.loads(Path(path).read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f'it holds a {type(value).__name__} where an object is expected')
        has_checksum = 'crc32' in value
        found = value.pop('crc32', None)
        if has_checksum and checked_json(value)['crc32'] != found:
            raise ValueError('its content does not match the crc32 in it; if you changed it by hand, remove that line')
        check(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is damaged ({error}): {remedy}')
    return value


def sha256(path) -> str:
    """The checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
