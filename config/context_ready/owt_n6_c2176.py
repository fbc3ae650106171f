# Roformer N = 6, C = 2176: table 1. Head size 136 is run by PyTorch's attention, not by Triton's.
from config.context_ready.owt_large import *

n_layer = 6
n_embd = 2176
K = 1
