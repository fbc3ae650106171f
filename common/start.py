"""What a program does before its long imports."""
import os
import signal
import sys


def quiet_start() -> None:
    """Ctrl-C ends the imports without a traceback, and standard files that the shell closed (`>&-`) are there again.

    What a terminal cannot show is shown as its code. `friendly_errors` of files.py takes over after the imports.
    PyTorch's threads that wait soon leave the core to others: OpenMP reads this as it is loaded.
    """
    os.environ.setdefault('GOMP_SPINCOUNT', '5000')
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number, name, mode in ((0, 'stdin', 'r'), (1, 'stdout', 'w'), (2, 'stderr', 'w')):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')
