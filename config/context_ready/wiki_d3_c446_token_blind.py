# D = 3, token_blind: tables A3 and A2, the row corr_ffn.
from config.context_ready.wiki import *

n_layer = 3
variant = 'token_blind'
