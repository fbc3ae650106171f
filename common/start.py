"""What a program does before its long imports."""
import os
import signal
import sys
import time


def quiet_start(decodes: bool = False) -> None:
    """Ctrl-C ends the imports without a traceback, and standard files that the shell closed (`>&-`) are there again.

    What a terminal cannot show is shown as its code. `friendly_errors` of files.py takes over after the imports.

    PyTorch's threads spin for a while when they wait, and then sleep; OpenMP reads for how long as it is loaded. The
    many short products of decoding are 1.3 to 1.5 times as fast where no thread falls asleep between two of them, but
    on cores that others use each wait is lost (`python -m bench.spin`). Training is long: others may come.
    """
    spins = 5000 if not decodes else 1000 if others_run() else 15000
    os.environ.setdefault('GOMP_SPINCOUNT', str(spins))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number, name, mode in ((0, 'stdin', 'r'), (1, 'stdout', 'w'), (2, 'stderr', 'w')):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')


def others_run() -> bool:
    """Whether other threads than this one use the cores now, at three looks. False where the system does not tell."""
    try:
        for _ in range(3):
            with open('/proc/loadavg') as file:
                n_running = int(file.read().split()[3].partition('/')[0])
            if n_running == 1:
                return False
            time.sleep(0.002)
    except (OSError, ValueError, IndexError):
        return False
    return True
