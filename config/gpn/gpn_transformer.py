# The GPN paper's Transformer++ (130.8M): 12 layers of 768 (table 1), head tied and linear layers as torch initialises
# them (official code), on the same data and schedule.
from config.gpn.gpn_130m import *

model = 'standard'
n_layer = 12
n_head = 12
n_embd = 768
n_ffn = 2816  # inferred: the paper says 130M and no width
init = 'torch'
