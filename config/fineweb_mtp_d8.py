# MTP, horizon 8, 1.72B: a baseline of the NextLat paper.
from config.fineweb_ntp import *

objective = 'mtp'
horizon = 8
