# 2x Memory, XS (53M): SPS paper, table 1. Settings as in Standard.
from config.standard_xs import *

model = 'sps'
method = 'two_x_memory'
window = None  # both streams are persistent
