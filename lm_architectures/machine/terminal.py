"""What a person sees and sends while training runs: progress lines, Ctrl-C and other signals."""
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def make_progress() -> Callable[[str], None]:
    """Return a function that prints progress: on a terminal, one updating line; else every 10 s."""
    shown = 0.0

    def progress(line):
        nonlocal shown
        if sys.stdout.isatty():
            say(line[:shutil.get_terminal_size().columns - 1], end='')
        elif time.time() - shown > 10:
            shown = time.time()
            say(line)
    return progress


def say(line: str, end: str = '\n') -> None:
    """Print a line in place of the updating one."""
    with suppress(OSError):  # the terminal is closed: SIGHUP will stop the run
        print(('\r\x1b[K' if sys.stdout.isatty() else '') + line, end=end, flush=True)


@contextmanager
def catch_signals() -> Iterator[list]:
    """Yield a list that becomes non-empty at the first SIGINT, SIGTERM or SIGHUP.

    The same SIGINT or SIGTERM again kills the process; a second SIGHUP, which shells may send, is
    ignored. Signals that were ignored before (under nohup) stay ignored.
    """
    stop = []
    if threading.current_thread() is not threading.main_thread():  # Python allows it only there
        yield stop
        return

    def on_signal(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
