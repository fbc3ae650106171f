# GPN without memory (130.5M): GPN paper, table 1.
from config.gpn.gpn_130m import *

n_head = 0
n_embd = 3184
