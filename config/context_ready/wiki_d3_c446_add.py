# D = 3, add: tables A3 and A4. guess: batch 64.
from config.context_ready.wiki import *

n_layer = 3
variant = 'add'
