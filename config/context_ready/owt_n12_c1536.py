# Roformer N = 12, C = 1536: table 1.
from config.context_ready.owt_large import *

n_layer = 12
n_embd = 1536
K = 1
