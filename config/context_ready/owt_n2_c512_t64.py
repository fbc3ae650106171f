# Roformer N = 2, C = 512: table 3, on the tokens of its pair.
from config.context_ready.owt_d2_c512_t64 import *

K = 1
