# D = 8, C = 1024: table A8. Batch and steps are unknown and taken from table 1, which cannot
# be right: in A8, D = 8 is worse than D = 5, and both are worse than D = 6 in table 1.
from config.context_ready.owt import *

n_layer = 8
n_embd = 1024
