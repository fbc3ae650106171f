# Roformer N = 12, C = 768: tables 1 and A13.
from config.context_ready.owt import *

n_layer = 12
n_embd = 768
K = 1
