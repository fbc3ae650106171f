# Roformer-hFFN N = 3, C = 50, one head: table A4. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
n_embd = 50
variant = 'extra_ffn'
K = 1
