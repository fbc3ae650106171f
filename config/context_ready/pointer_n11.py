# Pointer chasing, Roformer N = 11: table 5.
from config.context_ready.pointer_d1 import *

n_layer = 11
K = 1
bptt = False
prefill = 'parallel'
