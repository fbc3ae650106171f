# NextLat paper: path-star graphs G(2, 10), Belief State Transformer (table of hyperparameters).
# Test on 20,000 graphs: python eval.py RUN --val --data=path_star:degree=2,length=10,nodes=100
model = 'bst'
data = 'path_star:degree=2,length=10,nodes=100,val_rows=2000'
block_size = 66
max_tokens = 20_000 * 512 * 66
mask_documents = False
n_layer = 12
n_head = 6
n_embd = 384
batch_size = 512
micro_batch_size = 128  # about 635 pairs of prefix and suffix per graph
learning_rate = 5e-4
schedule = 'constant'
warmup_tokens = 0
grad_clip = 100.0
eval_interval = 500
sample_tokens = 0
