# The word problem of A5 at a size for two cores, where words of 4 are learned: NextLat; the baseline is
# --objective=ntp. Words three times as long: python -m analysis.a5 RUN --length=12. Of words as short as these, 7% of
# the held-out ones are in the training set too.
from config.nextlat.a5 import *

data = 'a5:length=4,val_rows=1000'
block_size = 4
n_head = 4
n_embd = 128
n_dynamics = 256
max_tokens = 20_000_000
learning_rate = 1e-3
warmup_tokens = 200_000
eval_interval = 500
