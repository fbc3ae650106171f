# D = 1, C = 2048, K from 2 to 10: table 4.
from config.context_ready.owt_long import *

n_layer = 1
n_embd = 2048
K = 10
