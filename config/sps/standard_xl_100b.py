# Standard Transformer, XL, planned for 100B tokens, which decays from 90B on: SPS paper, figure 1. Stop it once its
# validation loss is that of SPS at 18B tokens: the paper's took 47B, at a constant rate. Its first 18B tokens are those
# of config/standard_xl.py: python train.py --extend=out/standard_xl --max_tokens=100e9 --out_dir=out/standard_xl_100b
from config.standard_xl import *

max_tokens = 100_000_000_000
