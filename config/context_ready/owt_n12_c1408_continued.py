# The control in table A11: the same steps without conversion. guess: batch 32.
from config.context_ready.owt_d12_c1408_finetune import *

K = 1
