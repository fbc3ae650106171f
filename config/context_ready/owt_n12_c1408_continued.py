# The same steps without conversion: table A11, the control.
from config.context_ready.owt_d12_c1408_finetune import *

K = 1
