# D = 2, C = 256: table 3, 20 tokens per parameter ("Chinchilla-matched").
from config.context_ready.owt_short import *

n_layer = 2
n_embd = 256
n_head = 4
max_tokens = 370_000_000
