# Roformer N = 4: table A4. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 4
K = 1
