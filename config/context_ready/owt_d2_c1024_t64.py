# D = 2, C = 1024: table 3, 20 tokens per parameter ("Chinchilla-matched").
from config.context_ready.owt_short import *

n_layer = 2
n_embd = 1024
n_head = 16
max_tokens = 1_982_000_000
