# Reverse SPS, XL (1.678B): SPS paper, table 1. The backbone and training of Standard, another attention pattern.
from config.standard_xl import *

model = 'sps'
method = 'reverse_sps'
