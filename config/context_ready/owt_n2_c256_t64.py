# Roformer N = 2, C = 256: table 3, with as many tokens as its Context-Ready counterpart.
from config.context_ready.owt_d2_c256_t64 import *

K = 1
