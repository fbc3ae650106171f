# D = 1, C = 2048, windows of 512: tables A9, 6 and A7. guess: batch 64. 100,000 of these steps (A7) come near
# 200,000 with windows of 256 (A9), so a step has twice the tokens.
from config.context_ready.owt_d1_c2048 import *

block_size = 512
max_tokens = 200_000 * 64 * 512
warmup_tokens = 1000 * 64 * 512
