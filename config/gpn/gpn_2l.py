# GPN+M, two layers (132.8M): GPN paper, table 1.
from config.gpn.gpn_130m import *

n_layer = 2
n_embd = 1920
n_head = 11  # inferred from 360K memory values
bptt_len = 512  # section 5
