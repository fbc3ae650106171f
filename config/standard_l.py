# Standard Transformer, L (831M): SPS paper, table 1.
from config.standard_m import *

n_layer = 36
n_head = 20
n_embd = 1280
