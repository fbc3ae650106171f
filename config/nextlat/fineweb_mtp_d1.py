# MTP, horizon 1, 1.37B: a baseline of the NextLat paper. Settings as in fineweb_nextlat_d1.
model = 'mtp'
horizon = 1
n_layer = 22
n_head = 16
n_embd = 2048
block_size = 1024
batch_size = 512
max_tokens = 100_000_000_000
learning_rate = 4e-4
min_lr = 4e-5  # inferred, as in fineweb_nextlat_d1
warmup_tokens = 1_000_000_000  # the rate decays over the last 10B
eval_interval = 1000
