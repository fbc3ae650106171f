# A control that table A11 lacks: the same steps without conversion. Batch 32 is a guess.
from config.context_ready.owt_d24_c1024_finetune import *

K = 1
