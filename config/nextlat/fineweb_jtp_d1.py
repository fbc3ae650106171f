# JTP, horizon 1, 1.34B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d1 import *

model = 'jtp'
