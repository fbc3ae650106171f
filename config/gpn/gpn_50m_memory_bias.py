# Decoder-bias study with memory (49.8M), beyond the paper.
from config.gpn.gpn_50m_bias import *

n_embd = 1216
n_head = 7
