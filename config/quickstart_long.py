# SPS on a folder of .txt files, 20 to 30 minutes on two cores: set --data=FOLDER.
from config.quickstart import *

data = 'texts'  # a folder with at least 10 MB of text
n_layer = 6
batch_size = 8
max_tokens = 13_000_000
