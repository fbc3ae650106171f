# N = 24 to D = 24, C = 1024: table A11, 18,000 further steps. Guesses: batch 32, K = 5.
from config.context_ready.owt_large import *

n_layer = 24
n_embd = 1024
init_from = 'out/owt_n24_c1024'
seed = 1338  # other batches than those init_from was trained on
max_tokens = 18_000 * 32 * 256
