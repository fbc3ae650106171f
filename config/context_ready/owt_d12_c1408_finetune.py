# N = 12 to D = 12, C = 1408: table A11, 200,000 further steps. Guesses: batch 32, K = 5.
from config.context_ready.owt_large import *

n_layer = 12
n_embd = 1408
init_from = 'out/owt_n12_c1408'
seed = 1338  # other batches than those init_from was trained on
max_tokens = 200_000 * 32 * 256
