# Standard Transformer, M (379M): SPS paper, table 1.
n_layer = 24
n_head = 16
n_embd = 1024
warmup_tokens = 100_000_000  # for M and larger; inferred
micro_batch_size = 6  # fits 80 GiB (--dry_run)
