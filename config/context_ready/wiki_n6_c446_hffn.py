# Roformer-hFFN N = 6: table A12. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 6
variant = 'extra_ffn'
K = 1
