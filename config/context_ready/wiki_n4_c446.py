# Roformer N = 4: table A4. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 4
K = 1
