# Pointer chasing at a size for two cores: Context-Ready, D = 1, by exact backpropagation through time (appendix B, the wave).
# Roformers of N blocks beside it: --bptt=False --K=1 --prefill=parallel --n_layer=N
model = 'context_ready'
data = 'pointer_chasing:hops=3,keys=8,values=10,val_rows=256'
documents = False
n_layer = 1
n_head = 4
n_embd = 64
window = 61  # as 38 for sections of 30 tokens in the paper: a query sees the section before its own, not the base table
bptt = True
prefill = 'sequential'
block_size = 170
batch_size = 64
micro_batch_size = 64
max_tokens = 2000 * 64 * 170
learning_rate = 1e-3
schedule = 'constant'
warmup_tokens = 100 * 64 * 170
eval_interval = 50
eval_tokens = 40_000
save_interval = 1000
sample_tokens = 0
