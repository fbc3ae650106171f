# Roformer N = 24, C = 1024: table 2; converted in table A11. Batch 32 is a guess.
from config.context_ready.owt_large import *

n_layer = 24
n_embd = 1024
K = 1
