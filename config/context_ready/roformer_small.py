# Roformer N = 2, to compare with context_ready_small; --variant=extra_ffn is Roformer-hFFN.
from config.context_ready_small import *

K = 1
