# Roformer N = 6, C = 2176: table 1.
from config.context_ready.owt_large import *

n_layer = 6
n_embd = 2176
K = 1
