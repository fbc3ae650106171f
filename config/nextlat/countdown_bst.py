# NextLat paper: Belief State Transformer on Countdown, 12 layers in each encoder, all pairs.
model = 'bst'
data = 'countdown:val_rows=1000'
block_size = 27
max_tokens = 100_000 * 1024 * 27
mask_documents = False
n_layer = 12
n_head = 12
n_embd = 768
batch_size = 1024
micro_batch_size = 128
learning_rate = 3e-4
schedule = 'constant'
warmup_tokens = 0
eval_interval = 1000
sample_tokens = 0
