# What the rows of the Context-Ready paper share (section 5.1, tables A1 and 1): OpenWebText, vocabulary 32,000, 100,000
# steps. The paper leaves open betas and weight decay (as in the SPS paper here), warm-up (1,000 steps) and, but for T =
# 1024, the heads: 16, so that they are C / 16 wide; at widths 256 and 512 heads of 64. The tokenizer is a guess too:
# python -m data.tokenizers Skylion007/openwebtext --vocab_size=32000 --out=bpe32k.json
model = 'context_ready'
data = 'data/built/openwebtext'
make_data = ('python prepare_fineweb.py Skylion007/openwebtext --id_field=None --tokenizer=bpe32k.json '
             '--out_dir=data/built/openwebtext')
assumed_ids = 32_000
documents = False
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
