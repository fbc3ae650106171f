# What tables A2 to A5 and A12 share: English Wikipedia, BPE 16k. guess: batch 64, and in A2 to A5
# windows of 256 and 100,000 steps, which the paper states for A12. guess: one head at C = 446. RoPE needs heads of an
# even size, and of the divisors only 1 and 223 leave that.
from config.context_ready.owt import *

data = 'data/built/wikipedia'
make_data = ('python prepare_fineweb.py wikimedia/wikipedia --config=20231101.en --id_field=id '
             '--tokenizer=YOUR_16K_TOKENIZER --out_dir=data/built/wikipedia')
assumed_ids = 16_000
n_embd = 446
n_head = 1
