# 2x Memory, L (831M): SPS paper, table 1. Settings as in Standard.
from config.standard_l import *

model = 'sps'
method = 'two_x_memory'
window = None  # both streams are persistent
micro_batch_size = 3  # fits 80 GiB (--dry_run)
