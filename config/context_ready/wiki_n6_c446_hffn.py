# Roformer-hFFN N = 6: table A12. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 6
variant = 'extra_ffn'
K = 1
