# Roformer N = 6, C = 1088: tables 4 and A6. Table A9 has a run of its own: owt_n6_c1088_t1024_a9.
from config.context_ready.owt_long import *

n_layer = 6
n_embd = 1088
K = 1
