# Small TinyStories for two cores: NextLat, on any folder of text, here Python's documentation.
# Baselines: --objective=ntp, --model=mtp and --model=jtp.
from config.nextlat.tinystories import *

data = 'python_docs'
n_layer = 4
n_head = 4
n_embd = 128
n_dynamics = 256
init_std = 0.03
block_size = 128
batch_size = 16
micro_batch_size = 16
max_tokens = 2000 * 16 * 128
learning_rate = 1e-3
warmup_tokens = 100_000
eval_interval = 500
