# Gated DeltaNet, 10 layers (130.5M): GPN paper, table 1, on the same data and schedule as GPN. The model's defaults are
# its size: heads and feed-forward width are inferred from the paper's state of 1.97M numbers and its 130M parameters.
from config.gpn.gpn_130m import *

model = 'gdn'
n_layer = 10
n_embd = 768
n_head = 6
