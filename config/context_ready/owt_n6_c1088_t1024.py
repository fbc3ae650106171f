# Roformer N = 6, C = 1088: tables 4 and A6. For table A9 see owt_n6_c1088_t1024_a9.
from config.context_ready.owt_long import *

n_layer = 6
n_embd = 1088
K = 1
