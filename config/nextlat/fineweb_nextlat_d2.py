# NextLat, horizon 2.
from config.nextlat.fineweb_nextlat_d1 import *

horizon = 2
