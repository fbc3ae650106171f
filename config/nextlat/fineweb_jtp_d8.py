# JTP, horizon 8, 1.34B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d8 import *

model = 'jtp'
