# Pointer chasing at a size for two cores: appendix B but for 3 hops and a width of 64; Context-Ready, D = 1, by exact backpropagation through
# time. Roformers of N blocks beside it: --bptt=False --K=1 --prefill=parallel --n_layer=N
model = 'context_ready'
data = 'pointer_chasing:hops=3,keys=5,values=10,val_rows=256'
documents = False
n_layer = 1
n_head = 4
n_embd = 64
window = 38
bptt = True
prefill = 'sequential'
block_size = 107
batch_size = 64
micro_batch_size = 64
max_tokens = 1500 * 64 * 107
learning_rate = 1e-3
schedule = 'constant'
warmup_tokens = 100 * 64 * 107
eval_interval = 50
eval_tokens = 27_000
save_interval = 1000
sample_tokens = 0
dtype = 'float32'
