# The control of context_ready_finetune: the same run and steps, without conversion.
from config.context_ready.context_ready_finetune import *

K = 1
