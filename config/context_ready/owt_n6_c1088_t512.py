# Roformer N = 6, C = 1088, windows of 512: table A9. The batch of 64 is inferred, as owt_d1_c2048_t512's.
from config.context_ready.owt_n6_c1088 import *

block_size = 512
max_tokens = 200_000 * 64 * 512
warmup_tokens = 1000 * 64 * 512
