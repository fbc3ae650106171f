# D = 6, add: table A12. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 6
