# Roformer N = 1, C = 1024: table A10.
from config.context_ready.owt_d1_c1024_matched import *

K = 1
