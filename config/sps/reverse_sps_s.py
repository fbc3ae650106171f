# Reverse SPS, S (131M): SPS paper, table 1. Settings as in Standard.
from config.standard_s import *

model = 'sps'
method = 'reverse_sps'
