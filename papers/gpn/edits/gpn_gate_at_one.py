"""GPN with the gate of eq. 4 fixed at 1: the predicted state is kept in full."""
from model_gpn import Config  # noqa: F401
from model_gpn import Model as GPN


class Model(GPN):
    def ground(self, u, s):
        return s + u
