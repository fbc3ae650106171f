# D = 8, C = 1024: table A8. Batch and steps are unknown. Here they are table 1's, which cannot
# be right: in A8, D = 5 and 8 have 38.60 and 39.10, but D = 6 has 36.56 in table 1.
from config.context_ready.owt import *

n_layer = 8
n_embd = 1024
