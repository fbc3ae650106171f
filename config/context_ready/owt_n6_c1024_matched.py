# Roformer N = 6, C = 1024: table A10.
from config.context_ready.owt_d6_c1024_matched import *

K = 1
