# Roformer N = 3: tables A2 and A12. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
K = 1
