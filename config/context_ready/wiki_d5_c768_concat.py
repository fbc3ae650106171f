# D = 5, C = 768, concat: table A12. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 5
n_embd = 768
n_head = 16
variant = 'concat'
