# NextLat, horizon 1 (1.40B in training, 1.32B at inference), the NextLat paper's main model: 100B
# tokens of FineWeb-Edu (table of hyperparameters; "FineWeb-Edu Pretraining"), all lambdas 1.
model = 'nextlat'
horizon = 1
n_dynamics = 6528
n_layer = 22
n_head = 16
n_embd = 2048
block_size = 1024
batch_size = 512  # 0.5M tokens, as in the paper's table and number of steps (its text says 500M)
max_tokens = 100_000_000_000
learning_rate = 4e-4
min_lr = 4e-5  # inferred: the paper says only that the rate decays linearly over the last 10B tokens
warmup_tokens = 1_000_000_000  # the rate decays over the last 10B
eval_interval = 1000
