"""Optional fast forms of recurrences, and attention kernels. Models train without them.

recurrent.py (with products.py) compiles any model's own step. delta.py, gdn.py and attention.py
implement code of the models a second time, so they are pinned: unless a setting forces them, they
run only while a digest of that code is in their PINS.
"""
import functools
import hashlib
import inspect
import io
import os
import sys
import textwrap
import tokenize
from pathlib import Path

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # no Triton for this platform
    triton = tl = None
    constexpr = jit = lambda x: x

KERNELS_ON_CPU = os.environ.get('TRITON_INTERPRET') == '1'  # Triton's interpreter: slow, for tests


def kernels_on_cpu():  # a function, because tests change the constant after it was imported
    return KERNELS_ON_CPU


def pinned(model, fast):
    """Return `fast`, a module of this folder, if it may replace the model's equations, else None.

    config.scan = 'loop': never; 'fast': always; 'auto': if the model is its file's Model, not a
    subclass, and the digest of the code that `fast` re-implements is one of `fast.PINS`.
    """
    file, cls, name = sys.modules[type(model).__module__], type(model), fast.__name__.rpartition('.')[2]
    if model.config.scan != 'auto':
        return fast if model.config.scan == 'fast' else None
    is_subclass = cls is not getattr(file, 'Model', None) or cls.__base__.__module__.partition('.')[0] != 'torch'
    if is_subclass:
        return warn_once(f'{cls.__module__}.{cls.__name__} is a subclass, so its equations run step by step: '
                         f'scans.{name} does not support subclasses')
    edited = f'{file.__name__.rpartition(".")[2]} was edited, so its equations run step by step, without scans.{name}'
    try:
        found = digest(*fast.implements(file))
    except (AttributeError, OSError) as error:  # renamed or removed, or defined in an interpreter
        return warn_once(f'{edited} ({error})')
    if found in fast.PINS:
        return fast
    edited += ' (it does not implement the edit)'
    if (Path(getattr(file, '__file__', '')).parent.parent / 'config.json').exists():  # a run's copy, not to be edited
        return warn_once(edited)
    return warn_once(f'{edited}. python -m pytest tests/scans -k {name} compares both forms: if they are equal, add '
                     f'{found!r} to PINS in scans/{name}.py')


@functools.cache
def digest(*objects):
    """Return a fingerprint of code: objects or text. It ignores comments, docstrings and layout."""
    return hashlib.sha256('\n'.join(map(_code, objects)).encode()).hexdigest()[:16]


def _code(x):
    code, starts_statement = '', True
    text = x if isinstance(x, str) else textwrap.dedent(inspect.getsource(x))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        if token.type != tokenize.STRING or not starts_statement:  # a string that starts a statement is a docstring
            code += '<' if token.type == tokenize.DEDENT else token.string  # a dedent has no text, an indent has
        starts_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return code


@functools.cache
def warn_once(message):
    if os.environ.get('RANK', '0') == '0':
        print(message, file=sys.stderr)
