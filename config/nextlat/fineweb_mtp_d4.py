# MTP, horizon 4, 1.52B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d1 import *

horizon = 4
