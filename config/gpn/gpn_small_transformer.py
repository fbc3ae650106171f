# Transformer (1.0M), to compare with gpn_small: the same data and number of tokens.
from config.gpn_small import (
    batch_size,
    block_size,
    data,
    eval_interval,
    eval_tokens,
    learning_rate,
    mask_documents,
    max_tokens,
    save_interval,
    schedule,
    warmup_tokens,
)

model = 'standard'
n_layer = 4
n_head = 4
n_embd = 136
init = 'torch'  # as in gpn_transformer
