# D = 3 without a correction network: table A2. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
variant = 'block_head'
