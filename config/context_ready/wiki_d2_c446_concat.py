# D = 2, concat: tables A3 and A12. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 2
variant = 'concat'
