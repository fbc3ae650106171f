# NextLat paper: TinyStories (table of hyperparameters), also with horizon = 8. Baselines:
# --objective=ntp; --model=mtp and --model=jtp, with lambda_mtp swept over 0.1 ... 1;
# tinystories_bst. Ablations: --lambda_kl=0; --lambda_h=0; --token_loss=ce --stop_head=False;
# --stop_target=False; --stop_head=False. The text is inferred: 2.7M stories are the second version
# of TinyStories, a file of the repository whose rows are the first version (2.12M). 6.55B tokens
# are 8.5 epochs of it. File and tokenizer: papers/nextlat/reproduce.py.
model = 'nextlat'
data = 'data/built/tinystories'
make_data = ("python prepare_fineweb.py TinyStoriesV2-GPT4-train.txt --split_at='<|endoftext|>' "
             '--tokenizer=tinystories.json --out_dir=data/built/tinystories')
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
