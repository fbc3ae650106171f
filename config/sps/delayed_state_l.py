# Delayed State, L (831M): SPS paper, table 1. Settings as in Standard.
from config.standard_l import *

model = 'sps'
method = 'delayed_state'
micro_batch_size = 3  # fits 80 GiB (--dry_run)
