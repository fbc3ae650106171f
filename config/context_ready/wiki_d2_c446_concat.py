# D = 2, concat: tables A3 and A12. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 2
variant = 'concat'
