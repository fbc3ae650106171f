# NextLat paper: path-star graphs G(7, 7) (table of hyperparameters; horizon l - 2). Baselines:
# --objective=ntp; --model=mtp and --model=jtp, with lambda_mtp swept over 0.1 ... 1. Test on 20,000
# graphs: python eval.py RUN --val --data=path_star:degree=7,length=7,nodes=100
from config.nextlat.path_star_g2_10 import *

data = 'path_star:degree=7,length=7,nodes=100,val_rows=2000'
horizon = 5
block_size = 135
max_tokens = 20_000 * 512 * 135
