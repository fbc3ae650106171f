# GPN+M (0.3M), small enough to train edited equations (papers/gpn/edits/) step by step on a GPU.
from config.gpn_small import *

n_embd = 128
d_emb = 64
d_k = 16
d_v = 32
block_size = 128  # length of BPTT
batch_size = 32  # step by step on a GPU, more rows cost little time
micro_batch_size = 32
max_tokens = 1_000_000
warmup_tokens = 50_000
dtype = 'float32'
eval_tokens = 100_000
eval_interval = 1_000_000
sample_tokens = 0
