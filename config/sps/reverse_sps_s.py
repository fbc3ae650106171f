# Reverse SPS, S (131M): SPS paper, table 1. The backbone and training of Standard, another attention pattern.
from config.standard_s import *

model = 'sps'
method = 'reverse_sps'
