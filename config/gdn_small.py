# Gated DeltaNet (1.0M), to compare with gpn_small: the same data and number of tokens.
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

model = 'gdn'
n_layer = 4
n_embd = 128
n_head = 4
d_k = 32
d_v = 64
n_ffn = 248
