# Roformer N = 12, C = 1408: table A11. Batch 32 is a guess.
from config.context_ready.owt_large import *

n_layer = 12
n_embd = 1408
K = 1
