# D = 1, C = 2048, windows of 1024, 200,000 steps: tables 6, A7, A9. Batch 32 is inferred: N = 6
# gains 0.10 nats per doubling of tokens at T = 256, and 0.19, or two doublings, from A6 to A9.
from config.context_ready.owt_d1_c2048 import *

block_size = 1024
batch_size = 32
micro_batch_size = 16
max_tokens = 200_000 * 32 * 1024
warmup_tokens = 1000 * 32 * 1024
