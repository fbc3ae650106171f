# Standard Transformer, XS (53M): SPS paper, table 1. The defaults of train.Settings are the paper's section 4; the
# learning rate decays to a tenth (min_lr), which is from the official code.
n_layer = 8
n_head = 8
n_embd = 512
