# Pointer chasing over 20 hops, C = 512: appendix B (all 21 levels after about 4,000 steps).
from config.context_ready.pointer_d1 import *

data = 'pointer_chasing:hops=20,keys=5,values=10,val_rows=256'
n_embd = 512
block_size = 658
max_tokens = 10_000 * 64 * 658
warmup_tokens = 100 * 64 * 658
