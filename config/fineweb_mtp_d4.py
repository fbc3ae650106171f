# MTP, horizon 4, 1.52B: a baseline of the NextLat paper.
from config.fineweb_mtp_d1 import *

horizon = 4
