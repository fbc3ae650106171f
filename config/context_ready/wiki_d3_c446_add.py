# D = 3, add: tables A3 and A4. Batch 64 is a guess.
from config.context_ready.wiki import *

n_layer = 3
variant = 'add'
