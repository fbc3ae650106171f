# Decoder-bias study (GPN paper, section 7.2): one layer, 50M (here 50.2M), 8k steps. Without bias:
# --decoder_bias=False --out_dir=out/gpn_50m_False
from config.gpn.gpn_nomem import *

n_embd = 1520
decoder_bias = True
max_tokens = 8_000 * 128 * 2048
