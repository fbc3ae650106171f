# Common settings of the runs of about 340M multiply-adds (table A1): 200,000 steps, batch 32.
# The batch of tables 2 and A11 and the K of A11 are guesses.
from config.context_ready.owt import *

batch_size = 32
micro_batch_size = 32
max_tokens = 200_000 * 32 * 256
warmup_tokens = 1000 * 32 * 256
