# D = 3, concat: table A3. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 3
variant = 'concat'
