# JTP, horizon 4, 1.34B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d4 import *

model = 'jtp'
