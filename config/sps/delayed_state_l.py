# Delayed State, L (831M): SPS paper, table 1. Standard with another attention pattern.
from config.standard_l import *

model = 'sps'
method = 'delayed_state'
micro_batch_size = 3  # fits 80 GiB (--dry_run)
