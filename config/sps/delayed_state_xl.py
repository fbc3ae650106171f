# Delayed State, XL (1.678B): SPS paper, table 1. Standard with another attention pattern.
from config.standard_xl import *

model = 'sps'
method = 'delayed_state'
micro_batch_size = 1  # fits 80 GiB (--dry_run)
