# Roformer-hFFN N = 3: table A2. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
variant = 'extra_ffn'
K = 1
