# Roformer N = 6, C = 1088, T = 512: table A9. Batch 64 is inferred, as in owt_d1_c2048_t512.
from config.context_ready.owt_n6_c1088 import *

block_size = 512
max_tokens = 200_000 * 64 * 512
warmup_tokens = 1000 * 64 * 512
