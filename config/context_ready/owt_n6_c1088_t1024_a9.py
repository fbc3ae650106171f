# Roformer N = 6, C = 1088, windows of 1024, 200,000 steps: table A9. Batch 32 is a guess, as
# in owt_d1_c2048_t1024. Table A6 states 16 for its own run, owt_n6_c1088_t1024.
from config.context_ready.owt_n6_c1088 import *

block_size = 1024
batch_size = 32
micro_batch_size = 16
max_tokens = 200_000 * 32 * 1024
warmup_tokens = 1000 * 32 * 1024
