# D = 1, C = 50, K from 2 to 10: table A5.
from config.context_ready.wiki import *

n_layer = 1
n_embd = 50
K = 10
