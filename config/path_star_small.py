# Path-star graphs G(2, 5) with 20 nodes at a size for two cores: NextLat; the baseline is --objective=ntp.
from config.path_star_g2_10 import *

data = 'path_star:degree=2,length=5,nodes=20,val_rows=1000'
horizon = 3
block_size = 31
n_layer = 4
n_head = 4
n_embd = 128
n_dynamics = 128
batch_size = 128
micro_batch_size = 128
max_tokens = 6000 * 128 * 31
learning_rate = 1e-3
lambda_kl = 0.1  # with 1.0 some seeds stay for thousands of steps before they can follow an edge
grad_clip = 1.0
eval_interval = 200
init_std = 0.06  # small models start faster
warmup_tokens = 400_000
