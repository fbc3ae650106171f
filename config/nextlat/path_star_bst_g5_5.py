# NextLat paper: path-star graphs G(5, 5), Belief State Transformer. Test on 20,000 graphs:
# python eval.py RUN --val --data=path_star:degree=5,length=5,nodes=100
from config.nextlat.path_star_bst_g2_10 import *

data = 'path_star:degree=5,length=5,nodes=100,val_rows=2000'
block_size = 67
max_tokens = 20_000 * 512 * 67
