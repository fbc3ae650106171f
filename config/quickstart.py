# A small Standard Transformer on this Python installation's own documentation: a laptop, no download, a few minutes.
data = 'python_docs'
n_layer = 4
n_head = 6
n_embd = 192
block_size = 256
batch_size = 8
max_tokens = 5_000_000
learning_rate = 2e-3
warmup_tokens = 200_000
decay_fraction = 0.3
eval_interval = 250
log_interval = 10
save_interval = 250
