# Transformer, to compare with recall_small: the same rows and budget. Others: --model=sps, gdn, ...
from config.gpn.recall_small import (
    batch_size,
    block_size,
    data,
    eval_interval,
    learning_rate,
    mask_documents,
    max_tokens,
    micro_batch_size,
    schedule,
    warmup_tokens,
)

model = 'standard'
n_layer = 2
n_head = 4
n_embd = 64
