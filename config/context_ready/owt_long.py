# What tables 4 and A6 share: windows of 1024 tokens, 16 a step, 100,000 steps. Table 4's best perplexities come later:
# after 110,000 steps with K = 10 (--max_tokens=1802240000), after 135,000 with k_min (--max_tokens=2211840000).
# The rows of tables 6, A7 and A9 at this length have 32 (inferred: owt_d1_c2048_t1024).
from config.context_ready.owt import *

block_size = 1024
batch_size = 16
micro_batch_size = 16
