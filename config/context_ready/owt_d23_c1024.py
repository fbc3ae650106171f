# D = 23, C = 1024: tables 2, 6 and A8. guess: batch 32.
from config.context_ready.owt_large import *

n_layer = 23
n_embd = 1024
