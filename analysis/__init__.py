"""Figures and tables: each script reads run folders and writes a figure and the numbers behind it.

docs/evaluation.md and each paper's page list the commands. runs.py reads and groups runs, figures.py
writes and draws.
"""
import sys

from common.start import quiet_start

if sys.argv[0] == '-m':  # Python is importing this package for `python -m analysis.NAME`
    quiet_start()
