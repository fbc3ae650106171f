# What the rows of about 340M multiply-adds share (table A1): 200,000 steps of 32 sequences. guess: the same batch in
# tables 2 and A11, and in A11 the same K.
from config.context_ready.owt import *

batch_size = 32
micro_batch_size = 32
max_tokens = 200_000 * 32 * 256
warmup_tokens = 1000 * 32 * 256
