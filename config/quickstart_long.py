# SPS on a folder of .txt files: 20 to 30 minutes on two cores. python train.py config/quickstart_long.py --data=FOLDER
from config.quickstart import *

data = 'texts'  # the folder; 10 MB of text or more
n_layer = 6
batch_size = 8
max_tokens = 13_000_000
