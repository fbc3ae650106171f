# D = 2, add: table A3. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 2
variant = 'add'
