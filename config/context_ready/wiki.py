# Shared by tables A2 to A5 and A12: English Wikipedia, BPE 16k. Guesses: batch 64; in A2 to
# A5 windows of 256 and 100,000 steps (stated for A12); one head at C = 446 (RoPE needs heads of an
# even size, which only 1 or 223 heads give); the tokenizer:
# hf download wikimedia/wikipedia --repo-type=dataset --include='20231101.en/*' \
#     --local-dir=wikipedia
# python -m lm_architectures.data.text.train_tokenizer wikipedia --vocab_size=16000 \
#     --out=bpe16k.json
from config.context_ready.owt import *

data = 'data/built/wikipedia'
make_data = 'python prepare_fineweb.py wikipedia --tokenizer=bpe16k.json --out_dir=data/built/wikipedia'
assumed_ids = 16_000
n_embd = 446
n_head = 1
