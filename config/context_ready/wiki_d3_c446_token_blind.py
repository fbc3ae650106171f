# D = 3, token_blind: tables A3 and A2, the row corr_ffn. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
variant = 'token_blind'
