# A small GPN+M (1.0M) on this Python installation's own documentation. The same size without memory:
# --n_head=0 --n_embd=304; with two layers: --n_layer=2 --n_embd=176 --n_ffn=496
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
