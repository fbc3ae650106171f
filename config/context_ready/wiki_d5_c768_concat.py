# D = 5, C = 768, concat: table A12. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 5
n_embd = 768
n_head = 16
variant = 'concat'
