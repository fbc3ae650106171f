# Roformer N = 6, C = 1088: tables 1 and A13; A9 with --max_tokens=3276800000 (200,000 steps).
from config.context_ready.owt import *

n_layer = 6
n_embd = 1088
K = 1
