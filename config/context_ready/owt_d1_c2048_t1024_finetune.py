# D = 1, C = 2048, converted and trained with K = 10: table 4, last row, 130,000 steps.
from config.context_ready.owt_d1_c2048_t1024_k10 import *

init_from = 'out/owt_n1_c2048_t1024'
seed = 1338  # not the batches of the first run
max_tokens = 130_000 * 16 * 1024
