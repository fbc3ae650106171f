# The decoder-bias study (GPN paper, section 7.2): one layer, 50M, 8k steps. The paper says no more of its size: this is
# 50.2M. Without: --decoder_bias=False --out_dir=out/gpn_50m_False
from config.gpn.gpn_nomem import *

n_embd = 1520
decoder_bias = True
max_tokens = 8_000 * 128 * 2048
