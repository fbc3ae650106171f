# Standard Transformer, XL (1.678B): SPS paper, table 1.
from config.standard_m import *

n_layer = 48
n_head = 25
n_embd = 1600
