# NextLat paper: Countdown (table of hyperparameters), also horizon = 4 and 8, and three seeds.
# Baselines: --objective=ntp; --model=mtp and --model=jtp, with lambda_mtp swept over 0.1 ... 1.
# Test on 10,000 problems: python eval.py RUN --val --data=countdown
model = 'nextlat'
data = 'countdown:val_rows=1000'
horizon = 1
lambda_h = 2.0
block_size = 27
max_tokens = 100_000 * 1024 * 27
mask_documents = False
n_layer = 12
n_head = 12
n_embd = 768
n_dynamics = 768
batch_size = 1024
micro_batch_size = 1024
learning_rate = 3e-4
schedule = 'constant'
warmup_tokens = 0
eval_interval = 1000
sample_tokens = 0
