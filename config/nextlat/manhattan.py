# NextLat paper: Manhattan taxi rides (table of hyperparameters), on the map of
# github.com/keyonvafa/world-model-evaluation (MIT license).
# Baselines: --objective=ntp; --model=mtp and --model=jtp, with lambda_mtp swept over 0.1 ... 1.
model = 'nextlat'
data = 'manhattan:edges=data/built/manhattan.pkl'
make_data = ('curl -L --create-dirs -o data/built/manhattan.pkl https://raw.githubusercontent.com/keyonvafa/'
             'world-model-evaluation/main/mapping/sequences/random/node_and_direction_to_neighbor.pkl '
             f'# {data}')
assumed_ids = 4588  # 4,579 places as in Vafa et al.'s file (paper: 4,580), 8 directions, end token
horizon = 8
lambda_kl = 0.1
block_size = 256
max_tokens = 6 * 4_700_000_000  # six epochs as in the paper's text; its table's 400k steps are 5.6
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
