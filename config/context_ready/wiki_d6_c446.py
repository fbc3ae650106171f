# D = 6, add: table A12. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 6
