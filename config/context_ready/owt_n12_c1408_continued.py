# The control in table A11: the same steps without conversion. Batch 32 is a guess.
from config.context_ready.owt_d12_c1408_finetune import *

K = 1
