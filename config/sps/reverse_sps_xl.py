# Reverse SPS, XL (1.678B): SPS paper, table 1. The backbone and training of Standard, another attention pattern.
from config.standard_xl import *

model = 'sps'
method = 'reverse_sps'
micro_batch_size = 1  # a step fits 80 GiB by --dry_run
