# Common settings of the OpenWebText runs (section 5.1, tables 1 and A1): vocabulary 32,000, 100,000
# steps. Not in the paper: betas and weight decay (here the SPS paper's), warm-up (1,000 steps), the
# tokenizer, and heads except at T = 1024 (16 here; 64 wide at C = 256 and 512). The tokenizer:
# python -m lm_architectures.data.text.train_tokenizer Skylion007/openwebtext \
#     --vocab_size=32000 --out=bpe32k.json
model = 'context_ready'
data = 'data/built/openwebtext'
make_data = ('python prepare_fineweb.py Skylion007/openwebtext --id_field=None --tokenizer=bpe32k.json '
             '--out_dir=data/built/openwebtext')
assumed_ids = 32_000
mask_documents = False
n_head = 16
K = 5
k_min = 2
dropout = 0.2
block_size = 256
batch_size = 64
micro_batch_size = 64
max_tokens = 100_000 * 64 * 256
learning_rate = 2e-4
schedule = 'constant'
warmup_tokens = 1000 * 64 * 256
eval_interval = 1000
