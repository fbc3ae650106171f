# D = 1, C = 2048, windows of 512: tables 6, A7, A9. Batch 64 is inferred: 100,000 steps (A7)
# come close in loss to as many tokens at 256 (A9).
from config.context_ready.owt_d1_c2048 import *

block_size = 512
max_tokens = 200_000 * 64 * 512
warmup_tokens = 1000 * 64 * 512
