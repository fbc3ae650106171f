# Roformer N = 6, C = 2176: table 1. Heads are 136 wide: beyond the Triton kernels, PyTorch's own attention serves them.
from config.context_ready.owt_large import *

n_layer = 6
n_embd = 2176
K = 1
