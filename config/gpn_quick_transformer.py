# The Transformer beside gpn_quick: the same data, budget and size (1.0M).
from config.gpn_quick import data, documents, block_size, batch_size, max_tokens, learning_rate, schedule, warmup_tokens, eval_interval, save_interval

model = 'standard'
n_layer = 4
n_head = 4
n_embd = 136
