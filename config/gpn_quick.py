# A small GPN+M on this Python installation's own documentation. Without memory: --n_head=0 --n_embd=384; two layers: --n_layer=2 --n_embd=192
model = 'gpn'
data = 'python_docs'
documents = False
n_layer = 1
n_head = 4
n_embd = 256
d_emb = 128
d_k = 32
d_v = 64
block_size = 256
batch_size = 8
max_tokens = 2_000_000
learning_rate = 3e-3
schedule = 'cosine'
warmup_tokens = 100_000
eval_interval = 200
save_interval = 400
