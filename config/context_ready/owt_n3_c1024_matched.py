# Roformer N = 3, C = 1024: table A10.
from config.context_ready.owt_d3_c1024_matched import *

K = 1
