# D = 8, C = 1024: table A8.
from config.context_ready.owt import *

n_layer = 8
n_embd = 1024
