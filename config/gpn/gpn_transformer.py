# The GPN paper's Transformer++ (130.8M): 12 layers of 768 (table 1), data and schedule as for GPN.
# Tied head and nn.Linear's default initialization as in the official code.
from config.gpn.gpn_130m import *

model = 'standard'
micro_batch_size = 8
n_layer = 12
n_head = 12
n_embd = 768
n_ffn = 2816  # inferred from 130M; the paper gives no width
init = 'torch'
