# Roformer N = 4: table A4.
from config.context_ready.wiki import *

n_layer = 4
K = 1
