# JTP, horizon 2, 1.34B: a baseline of the NextLat paper.
from config.fineweb_ntp import *

objective = 'jtp'
horizon = 2
