# Pointer chasing, Roformer N = 12: table 5.
from config.context_ready.pointer_d1 import *

n_layer = 12
K = 1
bptt = False
prefill = 'parallel'
