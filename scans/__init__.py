"""Fast forms of recurrent equations. The folder is optional: without it, the equations run step by step."""
import functools
import os
import sys

from attn_kernels import digest


def pinned(model, fast):
    """Return `fast`, a module of this folder, where it may stand for the equations of the model, else None.

    config.scan decides: None for 'loop', `fast` without a check for 'fast'. With 'auto', the model must be of the class
    Model of its file, and `fast.PIN` the digest of the code there that `fast` re-implements: of any other code, it does
    not know the result.
    """
    file, cls = sys.modules[type(model).__module__], type(model)
    if model.config.scan != 'auto':
        return fast if model.config.scan == 'fast' else None
    if cls is not getattr(file, 'Model', None):
        _say(f'{cls.__module__}.{cls.__name__} is a subclass, so its equations run step by step: {fast.__name__} does '
             f'not know them')
        return None
    try:
        found = digest(*fast.implements(file))
    except (AttributeError, OSError) as error:  # renamed or removed, or typed into an interpreter
        found = str(error)
    if found == fast.PIN:
        return fast
    _say(f'{file.__name__} was edited, so its equations run step by step: {fast.__name__} does not know them. Once it '
         f'computes the same, set its PIN to {found!r}')
    return None


@functools.cache  # each message once
def _say(message):
    if os.environ.get('RANK', '0') == '0':
        print(message, file=sys.stderr)
