# The GPN paper's Transformer++ (table 1): 12 layers of 768, untied head, on the same data and schedule.
from config.gpn_130m import *

model = 'standard'
n_layer = 12
n_head = 12
n_embd = 768
n_ffn = 2048  # 8/3 of the width
tied_head = False
