# The same steps without conversion: table A11, the control.
from config.context_ready.owt_d24_c1024_finetune import *

K = 1
