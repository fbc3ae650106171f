# Standard Transformer, XL, 100B tokens, decaying from 90B on: SPS paper, figure 1. Continues
# standard_xl; stop at the validation loss of SPS at 18B tokens (the paper's took 47B, at a constant
# rate): python train.py --extend=out/standard_xl --max_tokens=100e9 --out_dir=out/standard_xl_100b
from config.standard_xl import *

max_tokens = 100_000_000_000
