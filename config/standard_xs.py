# Standard Transformer, XS (53M): SPS paper, table 1. train.py's defaults are the paper's section 4,
# with the decay to a tenth (min_lr) from the official code. The length of the warm-up is inferred:
# the paper only says "brief".
n_layer = 8
n_head = 8
n_embd = 512
