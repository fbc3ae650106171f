# GPN+M, one layer (129.2M): GPN paper, sections 4 and 5. FineWeb-Edu in LLaMA-2 tokens, by
# prepare_fineweb.py --tokenizer=tokenizer.model
model = 'gpn'
data = 'data/built/fineweb_edu_llama2'  # --out_dir of prepare_fineweb.py
documents = False  # the state goes on over document boundaries
vocab_size = 32000
n_ids = 32000
block_size = 2048
batch_size = 128
max_tokens = 10_000 * 128 * 2048  # 10k steps, 2.6B tokens
learning_rate = 6e-4
schedule = 'cosine'  # to a tenth
warmup_tokens = 100 * 128 * 2048
eval_interval = 1000
