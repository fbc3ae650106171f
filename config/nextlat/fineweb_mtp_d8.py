# MTP, horizon 8, 1.72B: a baseline of the NextLat paper.
from config.nextlat.fineweb_mtp_d1 import *

horizon = 8
