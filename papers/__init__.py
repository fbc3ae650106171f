"""The papers: commands that reproduce their tables, and their own analyses."""
import sys

from lm_architectures.start import quiet_start

if sys.argv[0] == '-m':  # Python is importing this package for `python -m papers.PAPER.NAME`
    quiet_start()
