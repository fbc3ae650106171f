# Roformer N = 14, C = 1024: table 2. Batch 32 is a guess.
from config.context_ready.owt_large import *

n_layer = 14
n_embd = 1024
K = 1
