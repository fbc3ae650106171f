# A small NextLat model, which drafts for itself, on Python's documentation: two cores, no download.
from config.quickstart import *

model = 'nextlat'
n_layer = 8  # deep, so that a draft (p_psi and the head) is cheap in comparison
n_dynamics = 384
init_std = 0.03
learning_rate = 1.3e-3
