# Pointer chasing, D = 1, trained by exact BPTT: table 5 and appendix B (solved after about 16,000
# of 50,000 steps). Dropout, warm-up and weight decay are not in the paper.
model = 'context_ready'
data = 'pointer_chasing:hops=10,keys=5,values=10,val_rows=256'
mask_documents = False
n_layer = 1
n_head = 4
n_embd = 256
window = 38
bptt = True
block_size = 338
batch_size = 64
micro_batch_size = 64
max_tokens = 50_000 * 64 * 338
learning_rate = 1e-4
schedule = 'constant'
warmup_tokens = 100 * 64 * 338
eval_tokens = 86_000
sample_tokens = 0
dtype = 'float32'
eval_interval = 1000
