# NextLat paper: Belief State Transformer on TinyStories, 8 layers per encoder. pair_share is
# FineWeb-Edu's (not given for TinyStories).
from config.nextlat.tinystories import assumed_ids, data, make_data

model = 'bst'
pair_share = 0.1
n_layer = 8
n_head = 8
n_embd = 768
block_size = 256
batch_size = 256
micro_batch_size = 16
max_tokens = 100_000 * 256 * 256
learning_rate = 3e-4
schedule = 'constant'
warmup_tokens = 0
eval_interval = 1000
