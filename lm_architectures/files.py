"""Errors of one sentence, the lock of a folder, and files that are whole or absent.

Nothing here knows a run or a model. A script's `main` runs in `friendly_errors`, which turns a
UserError into one line. Files are replaced atomically, and writing follows no links.
"""
import errno
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from subprocess import CalledProcessError
from typing import IO

import filelock
import torch

ROOT = Path(__file__).resolve().parent.parent
NO_COMPILER = 'C compiler', 'C++ compiler', 'fatal error:', 'CalledProcessError'  # errors of torch.compile, Triton


# ---- errors and messages ----

class UserError(ValueError):
    """Invalid input. The message states what was given, what was expected and what to do."""


class MissingData(UserError):
    """No data of this name; a command may build it."""


@contextmanager
def friendly_errors(argv: list[str] | None) -> Iterator[None]:
    """Exit with status 1 and one sentence on UserError, OSError, lack of memory or a compiler.

    Any other error is a bug and keeps its traceback. argv: the arguments that Python code gave to
    `main`, which then gets every error as an exception; None: the command line.
    """
    if argv is not None:
        yield
        return
    program = Path(sys.argv[0]).name
    try:
        with redirect_stdout(sys.stdout or open(os.devnull, 'w')):  # closed, as by >&-
            yield
            print(end='', flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has exited, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        sys.exit(1)
    except (UserError, OSError) as error:
        disk_is_full = getattr(error, 'errno', 0) == errno.ENOSPC
        sys.exit(printable(f'{program}: {error}{": free some space and start again" if disk_is_full else ""}'))
    except (MemoryError, RuntimeError, CalledProcessError) as error:
        if any(text in repr(error) for text in NO_COMPILER):
            sys.exit(f'{program}: torch.compile and Triton need a C++ compiler and the headers of Python (on Debian: '
                     f'apt install g++ python3-dev). On a CPU, set --compile=False. {first_line(error)}')
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate" not in str(error):
            raise
        sys.exit(f'{program}: out of memory. For training, lower --micro_batch_size or give a checkpoint_ setting '
                 f'(--help); for sampling, shorten the prompts. {first_line(error)}')


def printable(text: str) -> str:
    """Escape control characters, which may come from untrusted files."""
    return ''.join(c if c.isprintable() or c in '\n\t' else c.encode('unicode_escape').decode() for c in text)


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with question marks."""
    return text.encode(errors='replace').decode()


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')


@functools.cache
def warn_once(line: str) -> None:
    """Print a line to stderr, under torchrun only on rank 0, and only the first time."""
    if 'TORCHELASTIC_RUN_ID' not in os.environ or os.environ['RANK'] == '0':  # set by torchrun
        print(printable(line), file=sys.stderr, flush=True)


def command(*args) -> str:
    """Return a shell command that runs a script, or '-m' and a module, from the current folder."""
    script, *rest = map(str, args)
    if script != '-m':
        return shlex.join(['python', os.path.relpath(ROOT / script), *rest])
    here = '' if Path.cwd() == ROOT else f'PYTHONPATH={shlex.quote(os.path.relpath(ROOT))} '
    return here + shlex.join(['python', script, *rest])


# ---- the lock of a folder ----

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
        with open_in_run(path, 'w') as file:
            file.write(f'process {os.getpid()} on {platform.node()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
        yield
    finally:
        lock.release()


# ---- writing ----

def open_in_run(path, mode: str) -> IO:
    """Open a text file of a run folder for writing, by lines. OSError if it is a link."""
    return open(path, mode, 1, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def sync(path) -> None:
    """Flush a file, or renames in a folder, to disk, so that they survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not os.path.isdir(path):  # CIFS and FUSE cannot flush a folder
            raise
    finally:
        os.close(fd)


def write_file(path, content: bytes) -> None:
    """Write a file atomically: after a crash it is either old or new."""
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.writing')
    temporary.unlink(missing_ok=True)  # of a killed process, or a link
    with open(temporary, 'xb') as file:
        file.write(content)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_json(path, value) -> None:
    """Write a value as JSON, atomically."""
    write_file(path, json.dumps(value, indent=1).encode())


def open_lines(path) -> IO:
    """Open a file of JSON lines for appending. Ends a line that a crash has cut."""
    lines = open_in_run(path, 'a')
    if (before := Path(path).read_bytes()) and not before.endswith(b'\n'):
        lines.write('\n')
    return lines


def remove(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- reading ----

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


def read_lines(path, check: Callable) -> list[dict]:
    """Return the objects in a file of JSON lines, [] if there is no file.

    Damaged lines are left out and counted on stderr. check(object): whether its types are right;
    it may raise an error if they are not.
    """
    path, found = Path(path), []
    lines = [line for line in path.read_bytes().splitlines() if line] if path.exists() else []
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            record = json.loads(line)
            if check(record):
                found.append(record)
    if n_damaged := len(lines) - len(found):
        warn_once(f'{path}: skipped {n_damaged} damaged line{"s" * (n_damaged > 1)}')
    return found


def is_number(value) -> bool:
    """Return True for a finite number of a usual size."""
    return type(value) in (int, float) and abs(value) < 1e300


def sha256(path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
