# Small pointer chasing for two cores: appendix B with 3 hops and C = 64; D = 1 by exact BPTT.
# Roformers of N blocks to compare: --bptt=False --K=1 --n_layer=N
from config.context_ready.pointer import *

data = 'pointer_chasing:hops=3,keys=5,values=10,val_rows=256'
n_embd = 64
block_size = 114
max_tokens = 1500 * 64 * 114
learning_rate = 1e-3
warmup_tokens = 100 * 64 * 114
eval_interval = 50
eval_tokens = 29_000
