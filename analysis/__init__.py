"""One file per figure or table of a paper: reads run folders, writes a figure and the numbers behind it.

They write beside the runs or to --out. docs/evaluation.md and the paper's page list the commands. figures.py has what
they share: reading runs, statistics over seeds, plots. edits.py has edited models to compare with.
"""
import sys

from common.start import quiet_start

if sys.argv[0] == '-m':  # as Python has it while it imports the package of `python -m analysis.NAME`
    quiet_start()
