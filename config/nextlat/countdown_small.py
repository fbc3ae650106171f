# Small Countdown for two cores: NextLat; baseline: --objective=ntp. Integers above 999 have no
# token, so the head has a tenth of the paper's rows. Muon instead of AdamW: see
# papers/nextlat/README.md.
from config.nextlat.countdown import *

data = 'countdown:largest=999,train_rows=100_000,val_rows=500'
n_layer = 4
n_head = 4
n_embd = 128
n_dynamics = 128
batch_size = 128
micro_batch_size = 128
max_tokens = 4000 * 128 * 27
optimizer = 'muon'
learning_rate = 4e-3
warmup_tokens = 400_000
eval_interval = 500
