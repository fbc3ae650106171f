"""Process setup that must run before the slow imports."""
import os
import sys

# Iterations that an idle OpenMP thread spins before it sleeps. With libgomp's default (300,000), training is 5 times
# slower than with this value while another program keeps a core busy. With 1,000 it is a quarter slower on an idle
# machine, because threads fall asleep between two matrix products (bench/results/spin_cpu.json).
SPIN_COUNT = '5000'


def quiet_start() -> None:
    """Prepare the process: closed standard streams are reopened.

    Characters that the terminal cannot show are printed as escapes. Libraries show no progress bars in a log file.
    Environment variables that the user has set are kept.
    """
    os.environ.setdefault('GOMP_SPINCOUNT', SPIN_COUNT)
    for number, name, mode in ((0, 'stdin', 'r'), (1, 'stdout', 'w'), (2, 'stderr', 'w')):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')
    if not sys.stderr.isatty():
        for name in ('TQDM_DISABLE', 'HF_DATASETS_DISABLE_PROGRESS_BARS', 'HF_HUB_DISABLE_PROGRESS_BARS'):
            os.environ.setdefault(name, '1')
