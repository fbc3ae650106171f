# Standard Transformer, XL (1.678B): SPS paper, table 1.
from config.standard_m import *

n_layer = 48
n_head = 25
n_embd = 1600
micro_batch_size = 2  # fits 80 GiB (--dry_run), including multi-GPU buffers
