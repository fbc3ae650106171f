# Standard Transformer, S (131M): SPS paper, table 1.
n_layer = 12
n_head = 12
n_embd = 768
