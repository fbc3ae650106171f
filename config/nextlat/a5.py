# NextLat paper: A5 word problem (table of hyperparameters). 800,000 words are inferred: 400,000
# steps of 1,024 are then the table's 512 epochs. The paper's text says a million words, of which
# the setup that it cites (Merrill et al.) trains on 80%. Baselines: --objective=ntp, and the same
# on words of the test length: --data=a5:length=36,train_rows=800_000,val_rows=2000 --block_size=36
# --max_tokens=14_745_600_000. No positions (NoPE): --rope_scaling=1e15,1e9,2e9,1.
# Test on 100,000 words of 36: python eval.py RUN --val --data=a5:length=36
model = 'nextlat'
data = 'a5:length=12,train_rows=800_000,val_rows=2000'
horizon = 1
lambda_kl = 0.0
block_size = 12
max_tokens = 400_000 * 1024 * 12
mask_documents = False
n_layer = 2
n_head = 8
n_embd = 512
n_dynamics = 1024
batch_size = 1024
micro_batch_size = 1024
learning_rate = 1e-4
schedule = 'constant'
warmup_tokens = 0
weight_decay = 0.01
eval_interval = 2000
sample_tokens = 0
