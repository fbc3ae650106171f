"""Side-by-side measurements: the sides take turns, and noise cancels in the ratio of their times.

    python -m bench.speed                       training steps and decoding of any models
    python -m papers.sps.inference              prefill and decoding (SPS paper, table 2)
    python -m papers.context_ready.generation   generation (Context-Ready paper, table A13)

timing.py times the sides, reporting.py prints and writes what they took. results/ has the
measurements that the pages cite.
"""
from lm_architectures.start import quiet_module

quiet_module()
