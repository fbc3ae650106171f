# The same steps without conversion: table A11, the control. guess: batch 32.
from config.context_ready.owt_d24_c1024_finetune import *

K = 1
