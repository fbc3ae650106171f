# GPN+M, one layer (129.2M): GPN paper, sections 4 and 5. FineWeb-Edu-10B in LLaMA-2 tokens, bos and
# eos around each document as in the official code. The tokenizer (papers/gpn/README.md):
# hf download meta-llama/Llama-2-7b-hf tokenizer.model --local-dir=.
model = 'gpn'
data = 'data/built/fineweb_edu_llama2'
make_data = ('python prepare_fineweb.py --config=sample-10BT --tokenizer=tokenizer.model --bos '
             '--shuffle=200_000 --max_tokens=2.8e9 --out_dir=data/built/fineweb_edu_llama2')
assumed_ids = 32_000
vocab_size = 32_000
mask_documents = False  # the state is carried across document boundaries
block_size = 2048
batch_size = 128
micro_batch_size = 128  # a step mostly reads weights; 48 GiB on a GPU (gpn_2l: 51), lower it for less
max_tokens = 10_000 * 128 * 2048  # 10k steps, 2.6B tokens
learning_rate = 6e-4
schedule = 'cosine'  # decays to a tenth
warmup_tokens = 100 * 128 * 2048
eval_interval = 1000
