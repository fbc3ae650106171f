# MTP, horizon 4, 1.52B: a baseline of the NextLat paper.
from config.fineweb_ntp import *

objective = 'mtp'
horizon = 4
