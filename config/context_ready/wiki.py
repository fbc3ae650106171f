# What tables A2 to A5 and A12 share: English Wikipedia, BPE 16k, windows of 256, 100,000 steps. The paper's C = 446 has
# no even head size but with one head: here 448, with 7 heads of 64 (0.9% more multiply-adds).
from config.context_ready.owt import *

# python prepare_fineweb.py wikimedia/wikipedia --config=20231101.en --id_field=id --tokenizer=YOUR_16K_TOKENIZER
#     --out_dir=data/built/wikipedia
data = 'data/built/wikipedia'
n_embd = 448
n_head = 7
