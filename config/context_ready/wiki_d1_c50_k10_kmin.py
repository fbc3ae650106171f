# D = 1, C = 50, K from 2 to 10: table A5. Guesses: Wikipedia, batch 64, windows of 256, one head.
# Appendix C.3 has OpenWebText, T = 1024, 16 heads for all K = 10 runs, but 16 does not divide 50.
from config.context_ready.wiki import *

n_layer = 1
n_embd = 50
K = 10
