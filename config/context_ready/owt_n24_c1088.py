# Roformer N = 24, C = 1088: table 1.
from config.context_ready.owt_large import *

n_layer = 24
n_embd = 1088
K = 1
