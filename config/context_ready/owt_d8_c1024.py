# D = 8, C = 1024: table A8. Its batch and steps are not in the paper.
from config.context_ready.owt import *

n_layer = 8
n_embd = 1024
