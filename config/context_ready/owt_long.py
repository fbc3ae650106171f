# Common settings of tables 4 and A6: windows of 1024, batch 16, 100,000 steps. Rows of tables 6, A7
# and A9 at this length use batch 32.
from config.context_ready.owt import *

block_size = 1024
batch_size = 16
micro_batch_size = 16
