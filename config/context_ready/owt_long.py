# Common settings of tables 4 and A6: windows of 1024, batch 16, 100,000 steps. For "Best PPL":
# 110,000, fixed K (--max_tokens=1802240000); 135,000, k_min (--max_tokens=2211840000).
# Rows of tables 6, A7 and A9 at this length use batch 32 (see owt_d1_c2048_t1024).
from config.context_ready.owt import *

block_size = 1024
batch_size = 16
micro_batch_size = 16
