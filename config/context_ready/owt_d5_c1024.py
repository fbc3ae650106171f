# D = 5, C = 1024: table A8 and 6. Its batch and steps are not in the paper.
from config.context_ready.owt import *

n_layer = 5
n_embd = 1024
