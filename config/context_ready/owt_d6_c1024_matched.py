# D = 6, C = 1024: table A10.
from config.context_ready.owt_short import *

n_layer = 6
n_embd = 1024
max_tokens = 1_126_000_000
