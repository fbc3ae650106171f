"""GPN with gamma = 0 in eq. 9: the memory does not decay and only changes by writes."""
import torch

from model_gpn import Config, Write  # noqa: F401
from model_gpn import Model as GPN


class WriteWithoutDecay(Write):
    def log_decay(self, normed):
        return torch.zeros_like(super().log_decay(normed))


class Model(GPN):
    write_type = WriteWithoutDecay
