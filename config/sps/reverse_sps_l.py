# Reverse SPS, L (831M): SPS paper, table 1. The backbone and training of Standard, another attention pattern.
from config.standard_l import *

model = 'sps'
method = 'reverse_sps'
micro_batch_size = 3  # a step fits 80 GiB by --dry_run
