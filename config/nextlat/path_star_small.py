# Small path-star graphs G(2, 5), 20 nodes, for two cores: NextLat; baseline: --objective=ntp.
# Losses and lambdas are the paper's; Muon at a high rate (papers/nextlat/runs.csv)
from config.nextlat.path_star_g2_10 import *

data = 'path_star:degree=2,length=5,nodes=20,val_rows=1000'
horizon = 3
block_size = 31
n_layer = 6
n_head = 4
n_embd = 96
n_dynamics = 128
batch_size = 128
micro_batch_size = 128
max_tokens = 2500 * 128 * 31
learning_rate = 4e-3
optimizer = 'muon'
warmup_tokens = 600_000
eval_interval = 100
init_std = 0.06  # small models start faster
