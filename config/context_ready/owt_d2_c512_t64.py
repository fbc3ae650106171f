# D = 2, C = 512: table 3, 20 tokens per parameter ("Chinchilla-matched").
from config.context_ready.owt_short import *

n_layer = 2
n_embd = 512
n_head = 8
max_tokens = 823_000_000
