# 2x Memory, M (379M): SPS paper, table 1. Settings as in Standard.
from config.standard_m import *

model = 'sps'
method = 'two_x_memory'
window = None  # both streams are persistent
