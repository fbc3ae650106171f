# 2x Memory, XL (1.678B): SPS paper, table 1. Settings as in Standard.
from config.standard_xl import *

model = 'sps'
method = 'two_x_memory'
window = None  # both streams are persistent
micro_batch_size = 1  # fits 80 GiB (--dry_run)
