# Roformer N = 6, C = 1088, windows of 512: table A9.
from config.context_ready.owt_n6_c1088 import *

block_size = 512
batch_size = 32
max_tokens = 200_000 * 32 * 512
