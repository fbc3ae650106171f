# A small SPS Transformer on Python's documentation: a few minutes on two cores, no download.
model = 'sps'
data = 'python_docs'
n_layer = 4
n_head = 6
n_embd = 192
init_std = 0.06  # larger than usual: rho must first learn to attend to its own x, and small models start faster
block_size = 256
batch_size = 4  # many small steps
max_tokens = 2_000_000
learning_rate = 9e-4  # 1.3e-3 for model = 'standard'
warmup_tokens = 200_000
decay_fraction = 0.3
eval_interval = 400
eval_tokens = 500_000  # for your own data, which may have millions
save_interval = 800
