# D = 1, C = 2048, windows of 1024, 200,000 steps: tables A9, 6 and A7. guess: batch 32. At T = 256, N = 6
# gains 0.10 nats per doubling of the tokens, and from A6 (batch 16, 100,000 steps) to A9 it gains 0.19, two doublings.
from config.context_ready.owt_d1_c2048 import *

block_size = 1024
batch_size = 32
micro_batch_size = 16
max_tokens = 200_000 * 32 * 1024
warmup_tokens = 1000 * 32 * 1024
