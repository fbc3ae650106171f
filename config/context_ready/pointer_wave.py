# Pointer chasing, "wave" of appendix B: C = 128, 20 values, learning rate 1e-3, 23,000 steps.
from config.context_ready.pointer_d1 import *

data = 'pointer_chasing:hops=10,keys=5,values=20,val_rows=256'
n_embd = 128
learning_rate = 1e-3
max_tokens = 23_000 * 64 * 338
