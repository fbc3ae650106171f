# NextLat, horizon 1, 1.40B to train and 1.32B to run: the NextLat paper's main model, on 100B tokens of FineWeb-Edu
# (table of hyperparameters; text: "FineWeb-Edu Pretraining"). All lambdas are 1.
model = 'nextlat'
horizon = 1
n_dynamics = 6528
n_layer = 22
n_head = 16
n_embd = 2048
block_size = 1024
batch_size = 512  # 0.5M tokens; the paper's text says 500M, its table and its number of steps 0.5M
max_tokens = 100_000_000_000
learning_rate = 4e-4
min_lr = 4e-5  # inferred: the paper says that the last 10B tokens decay linearly, and not to what
warmup_tokens = 1_000_000_000  # and the last 10B decay
eval_interval = 1000
