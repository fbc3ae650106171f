# Next-token baseline of the NextLat paper (1.32B), "GPT" in its tables.
from config.nextlat.fineweb_nextlat_d1 import *

objective = 'ntp'
