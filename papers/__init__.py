"""The papers: commands that reproduce their tables, and their own analyses."""
from lm_architectures.start import quiet_module

quiet_module()
