# Roformer N = 2, C = 1888: table 1.
from config.context_ready.owt import *

n_layer = 2
n_embd = 1888
K = 1
