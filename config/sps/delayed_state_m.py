# Delayed State, M (379M): SPS paper, table 1. Standard with another attention pattern.
from config.standard_m import *

model = 'sps'
method = 'delayed_state'
