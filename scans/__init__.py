"""Fast forms of recurrent equations. The folder is optional: without it, the equations run step by step."""
import functools
import sys

from attn_kernels import digest


def pinned(model, fast):
    """Return `fast`, a module of this folder, if it computes what the model's equations say, else None.

    config.scan decides: 'loop' is None, 'fast' is `fast` without a check. With 'auto' the model must be of its file's
    own class, and the code that `fast` re-implements must be the code it was written for: `fast.PIN` is its digest.
    """
    if model.config.scan != 'auto':
        return fast if model.config.scan == 'fast' else None
    module = sys.modules[type(model).__module__]
    found = digest(*fast.implements(module)) if type(model) is getattr(module, 'Model', None) else 'a subclass'
    if found == fast.PIN:
        return fast
    _say(f'{type(model).__module__}.{type(model).__name__}: the equations run step by step, because {fast.__name__} was '
         f'written for others. If it computes the same function, set its PIN to {found!r}')
    return None


@functools.cache  # once per message
def _say(message):
    print(message, file=sys.stderr)
