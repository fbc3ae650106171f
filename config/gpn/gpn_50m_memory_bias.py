# The decoder-bias study with memory, beyond the paper: 49.8M.
from config.gpn.gpn_50m_bias import *

n_embd = 1216
n_head = 7
