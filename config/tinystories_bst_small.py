# TinyStories for BST at a size for two cores, beside tinystories_small, on any folder of text.
from config.tinystories_bst import *

data = 'python_docs'
pair_share = 0.02
n_layer = 4
n_head = 4
n_embd = 128
init_std = 0.03
block_size = 128
batch_size = 16
micro_batch_size = 16
max_tokens = 2000 * 16 * 128
learning_rate = 1e-3
warmup_tokens = 100_000
eval_interval = 500
