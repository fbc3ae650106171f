# Pointer chasing, Roformer N = 5: table 5.
from config.context_ready.pointer_d1 import *

n_layer = 5
K = 1
bptt = False
prefill = 'parallel'
