# MTP, horizon 2, 1.42B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d1 import *

horizon = 2
