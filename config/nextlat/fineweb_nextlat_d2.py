# NextLat, horizon 2: NextLat paper, otherwise as fineweb_nextlat_d1.
from config.nextlat.fineweb_nextlat_d1 import *

horizon = 2
