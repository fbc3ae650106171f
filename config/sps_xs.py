# SPS, XS (53M): SPS paper, table 1. Standard with another attention pattern.
from config.standard_xs import *

model = 'sps'
