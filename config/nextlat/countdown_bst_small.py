# Small Countdown for two cores: BST, on half of countdown_small's problems (equal training time).
from config.nextlat.countdown_bst import *
from config.nextlat.countdown_small import (
    batch_size,
    data,
    eval_interval,
    learning_rate,
    micro_batch_size,
    n_embd,
    n_head,
    n_layer,
    optimizer,
    warmup_tokens,
)

pair_share = 0.1
max_tokens = 2000 * 128 * 27
