# Small TinyStories for two cores: BST, to compare with tinystories_small, on any folder of text.
from config.nextlat.tinystories_bst import *
from config.nextlat.tinystories_small import (
    batch_size,
    block_size,
    data,
    eval_interval,
    init_std,
    learning_rate,
    max_tokens,
    micro_batch_size,
    n_embd,
    n_head,
    n_layer,
    warmup_tokens,
)

pair_share = 0.02
