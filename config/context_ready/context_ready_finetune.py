# Converts a K = 1 run to Context-Ready and fine-tunes it (section 5.7):
# python train.py config/context_ready/context_ready_finetune.py --init_from=RUN
# Sizes, window and documents come from the run. The correction network's output starts at 0.
from config.context_ready_small import (
    batch_size,
    block_size,
    data,
    eval_interval,
    eval_seed,
    eval_tokens,
    learning_rate,
    micro_batch_size,
    schedule,
    warmup_tokens,
)

model = 'context_ready'
K = 10
k_min = 2
seed = 1338  # not the batches of the first run
max_tokens = 1_000_000
