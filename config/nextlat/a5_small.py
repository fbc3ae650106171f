# Small word problem of A5 for two cores: NextLat on words of 4; baseline: --objective=ntp. Words of
# 12: python eval.py RUN --val --data=a5:length=12. 7% of the words of 4 in the validation set are
# also in the training set.
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
