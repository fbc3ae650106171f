# Roformer N = 2, C = 1024: table A10.
from config.context_ready.owt_d2_c1024_matched import *

K = 1
