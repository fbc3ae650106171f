# SPS, M (379M): SPS paper, table 1. Settings as in Standard.
from config.standard_m import *

model = 'sps'
