# D = 5, C = 1120: tables 1 and A13.
from config.context_ready.owt import *

n_layer = 5
n_embd = 1120
