# What tables 4 and A6 share: windows of 1024 tokens, 16 a step, 100,000 steps.
from config.context_ready.owt import *

block_size = 1024
batch_size = 16
