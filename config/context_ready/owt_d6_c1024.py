# D = 6, C = 1024: table 1.
from config.context_ready.owt import *

n_layer = 6
n_embd = 1024
