# NextLat on this Python installation's own documentation: a model that drafts for itself; two cores, no download.
from config.quickstart import *

model = 'nextlat'
n_layer = 8  # deep beside p_psi and the head, which drafting runs
n_dynamics = 384
init_std = 0.03
learning_rate = 1.3e-3
