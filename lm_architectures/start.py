"""Process setup that must run before slow imports."""
import os
import sys

# Iterations an idle OpenMP thread spins before it sleeps. Compared with 5,000, libgomp's default of
# 300,000 is 5 times slower in training if another program keeps a core busy; 1,000 is a quarter
# slower on an idle machine: threads sleep between matrix products (bench/results/spin_cpu.json).
SPIN_COUNT = '5000'


def quiet_module() -> None:
    """Call `quiet_start` if Python is importing a package for `python -m PACKAGE.MODULE`."""
    if sys.argv[0] == '-m':
        quiet_start()


def quiet_start() -> None:
    """Prepare the process: escape what cannot be encoded, no progress bars in logs.

    Environment variables that the user has set are kept, except MPLBACKEND.
    """
    os.environ.setdefault('GOMP_SPINCOUNT', SPIN_COUNT)
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        continue  # of a stream that is closed, as by >&-: another file would get it
    os.close(number)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')
    if 'IPython' not in sys.modules:  # a notebook's `!python` inherits a backend that may be missing here
        os.environ['MPLBACKEND'] = 'agg'
    if sys.stderr and not sys.stderr.isatty():
        for name in ('TQDM_DISABLE', 'HF_DATASETS_DISABLE_PROGRESS_BARS', 'HF_HUB_DISABLE_PROGRESS_BARS'):
            os.environ.setdefault(name, '1')
