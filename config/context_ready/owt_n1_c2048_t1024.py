# Roformer N = 1, C = 2048, 85,000 steps: initial weights for the last row of table 4.
from config.context_ready.owt_long import *

n_layer = 1
n_embd = 2048
max_tokens = 85_000 * 16 * 1024
K = 1
