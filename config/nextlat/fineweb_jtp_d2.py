# JTP, horizon 2, 1.34B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d2 import *

model = 'jtp'
