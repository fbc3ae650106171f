# D = 1, C = 2048, K = 10 without k_min: tables 4 and A6.
from config.context_ready.owt_long import *

n_layer = 1
n_embd = 2048
K = 10
k_min = None
