# D = 2, add: table A3. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 2
variant = 'add'
