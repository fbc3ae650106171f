# D = 1, C = 2048, windows of 512: tables A9, 6 and A7. Its batch is a guess: as many tokens.
from config.context_ready.owt_d1_c2048 import *

block_size = 512
batch_size = 32
micro_batch_size = 32
