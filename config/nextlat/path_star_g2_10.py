# NextLat paper: path-star graphs G(2, 10) (table of hyperparameters; horizon l - 2). Baselines:
# --objective=ntp; --model=mtp and --model=jtp, with lambda_mtp swept over 0.1 ... 1. Test on 20,000
# graphs: python eval.py RUN --val --data=path_star:degree=2,length=10,nodes=100
model = 'nextlat'
data = 'path_star:degree=2,length=10,nodes=100,val_rows=2000'
horizon = 8
block_size = 66
max_tokens = 20_000 * 512 * 66
mask_documents = False
n_layer = 12
n_head = 6
n_embd = 384
n_dynamics = 384
batch_size = 512
micro_batch_size = 512
learning_rate = 5e-4
schedule = 'constant'
warmup_tokens = 0
grad_clip = 100.0
eval_interval = 500
sample_tokens = 0
