# Roformer N = 6, C = 1088, windows of 512: table A9. Its batch is a guess: as many tokens.
from config.context_ready.owt_n6_c1088 import *

block_size = 512
batch_size = 32
micro_batch_size = 32
max_tokens = 200_000 * 32 * 512
