# Manhattan taxi rides of the NextLat paper (table of hyperparameters; section on the details). Its map is in
# github.com/keyonvafa/world-model-evaluation (MIT licence); docs/data.md has the commands. The baselines:
# --objective=ntp, and --model=mtp and --model=jtp, for which it swept lambda_mtp over 0.1 ... 1.
model = 'nextlat'
data = 'manhattan:edges=data/built/manhattan/edges.json'
make_data = f'a file of a city, as docs/data.md describes it, gives {data}'
assumed_ids = 4588  # 4,579 places, as in the file of Vafa et al. (the paper says 4,580), 8 directions, the end
horizon = 8
lambda_kl = 0.1
block_size = 256
max_tokens = 6 * 4_700_000_000  # six epochs, as the text says; the table's 400k steps would be 5.6
n_layer = 48
n_head = 8
n_embd = 384
n_dynamics = 1536
batch_size = 256
micro_batch_size = 32
learning_rate = 1e-4
schedule = 'constant'
warmup_tokens = 0
weight_decay = 0.01
grad_clip = 0.0
eval_interval = 2000
