# Random walks on a 10 x 10 one-way grid, for two cores: NextLat; baseline: --objective=ntp.
from config.nextlat.manhattan import *

data = 'manhattan:grid=10,steps=30,length=128,max_distance=15,val_rows=64'
horizon = 4
block_size = 128
n_layer = 4
n_head = 4
n_embd = 96
n_dynamics = 192
batch_size = 32
micro_batch_size = 32
max_tokens = 1000 * 32 * 128
learning_rate = 2e-3
warmup_tokens = 200_000
eval_interval = 250
