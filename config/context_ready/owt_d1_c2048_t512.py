# D = 1, C = 2048, windows of 512: tables A9, 6 and A7.
from config.context_ready.owt_d1_c2048 import *

block_size = 512
batch_size = 32
