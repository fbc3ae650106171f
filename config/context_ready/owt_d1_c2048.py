# D = 1, C = 2048, 200,000 steps: table A9; tables 6 and A7 at 400,000, --max_tokens=6553600000.
from config.context_ready.owt import *

n_layer = 1
n_embd = 2048
max_tokens = 200_000 * 64 * 256
