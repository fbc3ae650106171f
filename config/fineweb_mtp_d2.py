# MTP, horizon 2, 1.42B: a baseline of the NextLat paper.
from config.fineweb_ntp import *

objective = 'mtp'
horizon = 2
