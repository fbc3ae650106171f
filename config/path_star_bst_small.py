# Path-star graphs G(2, 5) with 20 nodes for BST at a size for two cores, beside path_star_small.
from config.path_star_bst_g2_10 import *

data = 'path_star:degree=2,length=5,nodes=20,val_rows=1000'
pair_share = 0.1  # of the pairs: a step is then twice path_star_small's in FLOPs
block_size = 31
n_layer = 4
n_head = 4
n_embd = 128
batch_size = 128
micro_batch_size = 128
max_tokens = 6000 * 128 * 31
learning_rate = 1e-3
grad_clip = 1.0
eval_interval = 200
init_std = 0.06  # small models start faster
warmup_tokens = 400_000
