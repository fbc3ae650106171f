# 2x Memory, S (131M): SPS paper, table 1. Standard with another attention pattern.
from config.standard_s import *

model = 'sps'
method = 'two_x_memory'
window = None  # both streams are persistent
