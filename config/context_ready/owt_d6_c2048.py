# D = 6, C = 2048: table 1.
from config.context_ready.owt_large import *

n_layer = 6
n_embd = 2048
