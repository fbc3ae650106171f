# Common settings of tables 3 and A10: windows of 64 tokens, 1024 per step.
from config.context_ready.owt import *

block_size = 64
batch_size = 1024
micro_batch_size = 128
warmup_tokens = 1000 * 1024 * 64
