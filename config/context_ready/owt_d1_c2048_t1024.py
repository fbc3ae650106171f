# D = 1, C = 2048, windows of 1024: tables A9, 6 and A7. The batch of 16 is a guess; A6 states it for K = 10 and
# for N = 6.
from config.context_ready.owt_d1_c2048 import *

block_size = 1024
batch_size = 16
micro_batch_size = 16
