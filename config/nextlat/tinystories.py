# TinyStories of the NextLat paper (table of hyperparameters), which also takes horizon = 8. The baselines:
# --objective=ntp, --model=mtp and --model=jtp, for which it swept lambda_mtp over 0.1 ... 1, and tinystories_bst. The
# data are in a vocabulary of 1,000 trained on them: python -m data.tokenizers roneneldan/TinyStories --vocab_size=1000
# --out=tinystories.json. The ablations: --lambda_kl=0, --lambda_h=0, --token_loss=ce --stop_head=False,
# --stop_target=False, --stop_head=False.
model = 'nextlat'
data = 'data/built/tinystories'
make_data = ('python prepare_fineweb.py roneneldan/TinyStories --id_field=None --tokenizer=tinystories.json '
             '--out_dir=data/built/tinystories')
assumed_ids = 1000
horizon = 1
n_layer = 8
n_head = 8
n_embd = 768
n_dynamics = 2048
block_size = 256
batch_size = 256
micro_batch_size = 64
max_tokens = 100_000 * 256 * 256
learning_rate = 3e-4
schedule = 'constant'
warmup_tokens = 0
eval_interval = 1000
