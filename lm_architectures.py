"""The Python interface: `from lm_architectures import load, train`.

    run = load('out/quickstart')
    run.generate(['Return the'], max_new_tokens=50, temperature=0.8)
    folder = train.main(['config/quickstart.py', '--max_tokens=1e5'])

Works in any folder after `pip install -e .`, if configs have their full path. The repository's
folder is put on Python's path, because models and data are found there by name.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import train  # noqa: F401  for `train.main`
from common.interface import Run, load  # noqa: F401
