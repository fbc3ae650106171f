# D = 12, C = 1024: tables 2, 6 and A8. Batch 32 is a guess.
from config.context_ready.owt_large import *

n_layer = 12
n_embd = 1024
