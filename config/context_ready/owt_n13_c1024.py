# Roformer N = 13, C = 1024: table 2. Batch 32 is a guess.
from config.context_ready.owt_large import *

n_layer = 13
n_embd = 1024
K = 1
