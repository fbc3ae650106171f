# Small path-star graphs G(2, 5), 20 nodes, for two cores: BST, to compare with path_star_small.
from config.nextlat.path_star_bst_g2_10 import *
from config.nextlat.path_star_small import (
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
    optimizer,
    warmup_tokens,
)

pair_share = 0.1  # a step costs 1.7 times path_star_small's FLOPs
