# Reverse SPS, XL (1.678B): SPS paper, table 1. Settings as in Standard.
from config.standard_xl import *

model = 'sps'
method = 'reverse_sps'
micro_batch_size = 1  # fits 80 GiB (--dry_run)
