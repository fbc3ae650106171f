# Delayed State, XS (53M): SPS paper, table 1. Settings as in Standard.
from config.standard_xs import *

model = 'sps'
method = 'delayed_state'
