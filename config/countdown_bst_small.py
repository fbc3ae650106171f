# Countdown for BST at a size for two cores, beside countdown_small.
from config.countdown_bst import *

data = 'countdown:largest=999,train_rows=100_000,val_rows=500'
pair_share = 0.1
n_layer = 4
n_head = 4
n_embd = 128
batch_size = 128
micro_batch_size = 128
max_tokens = 4000 * 128 * 27
learning_rate = 1e-3
warmup_tokens = 400_000
eval_interval = 500
