# Countdown for BST at a size for two cores, beside countdown_small.
from config.countdown_bst import *
from config.countdown_small import (
    batch_size,
    data,
    eval_interval,
    learning_rate,
    max_tokens,
    micro_batch_size,
    n_embd,
    n_head,
    n_layer,
    warmup_tokens,
)

pair_share = 0.1
