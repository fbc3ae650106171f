# D = 6, add: table A12.
from config.context_ready.wiki import *

n_layer = 6
