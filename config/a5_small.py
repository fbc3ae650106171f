# The word problem of A5 at a size for two cores: NextLat; the baseline is --objective=ntp.
from config.a5 import *

data = 'a5:length=8,val_rows=1000'
block_size = 8
n_head = 4
n_embd = 128
n_dynamics = 256
batch_size = 256
micro_batch_size = 256
max_tokens = 10_000 * 256 * 8
learning_rate = 1e-3
warmup_tokens = 200_000
eval_interval = 500
