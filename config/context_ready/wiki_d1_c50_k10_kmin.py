# D = 1, C = 50, K from 2 to 10: table A5. guess: Wikipedia, batch 64, windows of 256 and one head. Appendix C.3 has
# OpenWebText, 1024 and 16 heads for all runs with K = 10, but 16 do not divide 50.
from config.context_ready.wiki import *

n_layer = 1
n_embd = 50
K = 10
