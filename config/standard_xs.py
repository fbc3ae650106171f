# Standard Transformer, XS (53M): SPS paper, table 1. The defaults of train.Settings are the paper's section 4.
n_layer = 8
n_head = 8
n_embd = 512
