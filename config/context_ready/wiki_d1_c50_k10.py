# D = 1, C = 50, K = 10 without k_min: table A5. Guesses as in wiki_d1_c50_k10_kmin.
from config.context_ready.wiki_d1_c50_k10_kmin import *

k_min = None
