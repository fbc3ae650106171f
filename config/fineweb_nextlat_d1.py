# NextLat, horizon 1, 1.40B to train and 1.32B to run: the NextLat paper's main model. All lambdas are 1.
from config.fineweb_ntp import *

objective = 'nextlat'
horizon = 1
n_dynamics = 6528
