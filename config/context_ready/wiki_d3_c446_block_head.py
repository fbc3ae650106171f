# D = 3 without a correction network: table A2.
from config.context_ready.wiki import *

n_layer = 3
variant = 'block_head'
