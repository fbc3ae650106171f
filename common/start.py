"""Process setup that must run before the slow imports."""
import os
import sys

# Iterations that an idle OpenMP thread spins before it sleeps. With libgomp's default (300,000), training is 5 times
# slower than with this value while another program keeps a core busy. With 1,000 it is a quarter slower on an idle
# machine, because threads fall asleep between two matrix products (bench/results/spin_cpu.json).
SPIN_COUNT = '5000'


def quiet_start() -> None:
    """Prepare the process: characters that the terminal cannot show are printed as escapes, no progress bars in logs.

    Environment variables that the user has set are kept.
    """
    os.environ.setdefault('GOMP_SPINCOUNT', SPIN_COUNT)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')
    if not sys.stderr.isatty():
        for name in ('TQDM_DISABLE', 'HF_DATASETS_DISABLE_PROGRESS_BARS', 'HF_HUB_DISABLE_PROGRESS_BARS'):
            os.environ.setdefault(name, '1')
