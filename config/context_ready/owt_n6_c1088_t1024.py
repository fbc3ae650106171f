# Roformer N = 6, C = 1088: tables 4 and A6; A9 with --max_tokens=3276800000.
from config.context_ready.owt_long import *

n_layer = 6
n_embd = 1088
K = 1
