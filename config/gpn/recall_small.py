# Small recall task for two cores: GPN+M (0.08M). Baselines: config/gpn/recall_small_transformer.py
model = 'gpn'
data = 'recall:pairs=8,distances=8-16-32-64,length=128,val_rows=256'
mask_documents = False
n_layer = 1
n_head = 4
n_embd = 64
d_emb = 64
d_k = 16
d_v = 32
block_size = 128
batch_size = 32
micro_batch_size = 32
max_tokens = 1000 * 32 * 128
learning_rate = 3e-3
schedule = 'cosine'
warmup_tokens = 100 * 32 * 128
eval_interval = 100
