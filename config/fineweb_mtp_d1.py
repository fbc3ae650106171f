# MTP, horizon 1, 1.37B: a baseline of the NextLat paper.
from config.fineweb_ntp import *

objective = 'mtp'
horizon = 1
