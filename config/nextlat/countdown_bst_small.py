# Countdown for BST at a size for two cores, in the time of countdown_small: half of its problems.
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
