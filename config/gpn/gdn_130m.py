# Gated DeltaNet, 10 layers (130.5M): GPN paper, table 1, data and schedule as for GPN. Heads and
# feed-forward width are inferred from the paper's 1.97M state values and 130M parameters.
from config.gpn.gpn_130m import *

model = 'gdn'
micro_batch_size = 8
n_layer = 10
n_embd = 768
n_head = 6
