# D = 3, C = 768: table A4. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
n_embd = 768
n_head = 16
