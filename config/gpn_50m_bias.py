# The decoder-bias study (GPN paper, section 7.2): one layer, 50M, 8k steps.
# Without: --decoder_bias=False --out_dir=out/gpn_50m
from config.gpn_130m import *

n_embd = 1216  # the paper says 50M and no more: this is 49.8M
n_head = 7
decoder_bias = True
max_tokens = 8_000 * 128 * 2048
