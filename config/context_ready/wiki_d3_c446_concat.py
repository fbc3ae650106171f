# D = 3, concat: table A3. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
variant = 'concat'
