"""Settings: dataclasses filled from one dict of values, wherever each value comes from.

`typed` gives a value the type of its setting, be it Python in a config file, JSON in a run or text
on the command line. Unknown names, wrong types and values outside a setting's `Literal` choices are
errors. lm_architectures/run/run_settings.py merges the settings of a training run.
"""
import ast
import builtins
import dataclasses
import difflib
import inspect
import math
import os
import re
import reprlib
import sys
import types
import typing
from contextlib import suppress
from pathlib import Path

from lm_architectures.files import ROOT, UserError, first_line

LARGEST = 2 ** 53  # largest number in a setting: integers up to here are exact as floats and in JSON
HERE = 'on the command line'
UNFIT = ValueError, SyntaxError, MemoryError, RecursionError  # of text that is no value; last two: nested too deeply


class Text(str):
    """A command-line value that is not yet converted to the type of its setting."""


# ---- where values come from ----

def parse_args(argv: list[str] | None) -> tuple[dict[str, str | bool], list[str]]:
    """Return ({name: Text, or True for --name}, positional arguments). None: the process's own.

    Arguments after `--` are positional. Expands ~/, as shells do not after an equals sign.
    """
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index('--') if '--' in argv else len(argv)
    argv, positional = ['--help' if arg == '-h' else arg for arg in argv[:end]], argv[end + 1:]
    options = [arg[2:].partition('=') for arg in argv if arg.startswith('--')]
    values = {name: Text(os.path.expanduser(text) if text.startswith('~/') else text) if equals else True
              for name, equals, text in options}
    return values, [arg for arg in argv if not arg.startswith('--')] + positional


def read_config_file(path: str) -> dict:
    """Return the assignments of a config file: no modules, functions or names starting with _."""
    if os.path.isfile(f'{path}/config.json'):
        raise UserError(f'{path} is a run folder, not a config file: to continue it, use --out_dir={path} --resume')
    if not os.path.isfile(path):
        known = sorted(os.path.relpath(p) for p in (ROOT / 'config').rglob('[a-z]*.py'))
        near = difflib.get_close_matches(path, known, 3, 0.4) or [os.path.relpath(ROOT / 'config/quickstart.py')]
        raise UserError(f'there is no config file {path}: did you mean {" or ".join(near)}?')
    try:
        names = run_config_file(path)
    except Exception as error:
        raise UserError(f'config file {path} does not run: {type(error).__name__}: {first_line(error)}')
    return {name: value for name, value in names.items()
            if not (name.startswith('_') or callable(value) or isinstance(value, types.ModuleType))}


def run_config_file(path) -> dict:
    """Return the names of a config file. It imports config.NAME from the repository's config/."""
    def import_(name, *args):
        if name.partition('.')[0] != 'config':
            return __import__(name, *args)
        return types.SimpleNamespace(**run_config_file(ROOT / f'{name.replace(".", "/")}.py'))
    names = {'__name__': Path(path).stem, '__file__': str(path),
             '__builtins__': {**vars(builtins), '__import__': import_}}
    exec(compile(Path(path).read_bytes(), path, 'exec'), names)
    return names


def load_settings(Settings: type, argv: list[str] | None) -> tuple:
    """Parse a script's command line: (settings, positional arguments, {name: value} given).

    Settings: a dataclass. `--help` prints all settings and exits.
    """
    values, positional = parse_args(argv)
    if values.pop('help', False):
        print_help(Settings)
    given = convert(values, HERE, Settings)
    return Settings(**given), positional, given


# ---- values of the right type ----

def convert(values: dict, where: str, *classes: type) -> dict:
    """Return values in the types of the classes' fields. UserError, with suggestions, if wrong."""
    types_of = {name: kind for cls in classes for name, kind in typing.get_type_hints(cls).items()}
    for name in values:
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of)
            known = f'expected {", ".join(types_of)}' if len(types_of) < 10 else 'run with --help for the list'
            hint = f'did you mean {" or ".join(map(repr, near))}?' if near else known
            raise UserError(f'unknown setting {name!r} {where}: {hint}')
    return {name: typed(name, value, types_of[name], where) for name, value in values.items()}


def typed(name: str, value, kind, where: str):
    """Convert a value to the type of its setting. UserError if impossible."""
    with suppress(*UNFIT):
        return fit(value, kind)
    near = difflib.get_close_matches(repr(value), words(kind), 1) if isinstance(value, str) else ()
    hint = f'; did you mean {near[0]}?' if near else f'; write --{name}=VALUE' if value is True else ''
    raise UserError(f'{name} is {reprlib.repr(value)} {where}: expected {expected(kind)}{hint}')


def fit(value, kind):
    """Return a value as a `kind`, the annotation of a setting. An error of UNFIT if impossible.

    A whole float such as 20e9 is accepted as an int, and an int as a float. Text is parsed: a tuple
    is written 1,2,4.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for part in sorted(args, key=lambda part: part is str):  # all text fits str, so it comes last
            if value != '' or part is not str:  # --init_from=$RUN with RUN unset, for example
                with suppress(*UNFIT):
                    return fit(value, part)
    elif origin is tuple and args[1:] == (...,):
        if isinstance(value, Text):
            value = [Text(part.strip()) for part in value.strip('()[]').removesuffix(',').split(',') if value]
        if type(value) in (tuple, list):
            return tuple(fit(part, args[0]) for part in value)
    elif isinstance(value, Text) and kind is not str and value not in args:
        return fit(ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(value, value)), kind)
    elif kind in (int, float):
        if type(value) in (int, float) and abs(value) <= LARGEST and kind(value) == value:
            return kind(value)
    elif origin is typing.Literal:
        plain = str(value) if isinstance(value, Text) else value
        if any(plain == choice and type(plain) is type(choice) for choice in args):
            return plain
    elif kind is str:
        if isinstance(value, str):
            return str(value)
    elif type(value) is kind:
        return value
    raise ValueError(value)


def words(kind) -> list[str]:
    """Return what an annotation allows: "'a'", 'int', 'None', 'int separated by commas'."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return [*map(repr, args)]
    if origin is tuple:
        return [f'{expected(args[0])} separated by commas' if args[1:] == (...,) else 'the type tuple[X, ...]']
    return [word for part in args for word in words(part)] or [kind.__name__.replace('NoneType', 'None')]


def expected(kind) -> str:
    """Describe an annotation: "'a', 'b' or None", 'int separated by commas'."""
    *first, last = words(kind)
    return ', '.join(first) + ' or ' * bool(first) + last


# ---- dataclasses of settings ----

def make_settings(Settings: type, values: dict, where: str):
    """Return a dataclass of settings, or a model's Config, with these values and defaults.

    Raises UserError for unknown names and invalid values; its message contains `where`.
    """
    values = convert(values, where, Settings)
    try:
        return Settings(**values)
    except (ValueError, ZeroDivisionError) as error:
        raise (type(error) if isinstance(error, UserError) else UserError)(f'{error} ({where})')


def check_ranges(settings, **ranges: float | tuple) -> None:
    """Raise UserError for a number below its least value, or outside (low, high). None is valid.

    Call it in __post_init__ of a settings dataclass. Numbers that it does not name may be negative.
    """
    for name, bounds in ranges.items():
        value, (low, high) = getattr(settings, name), bounds if isinstance(bounds, tuple) else (bounds, math.inf)
        if value is not None and not low <= value <= high:
            raise UserError(f'{name} is {value}: expected '
                            + (f'{low} to {high}' if high < math.inf else f'at least {low}'))


def print_help(*classes: type) -> None:
    """Print each setting of a script and model with its type, default and comment. Exits."""
    print((inspect.getmodule(classes[0]).__doc__ or '').strip())  # none under python -OO
    for cls, title in zip(classes, ('settings and their defaults', 'settings of the model')):
        print(f'\n{title} ({os.path.basename(inspect.getfile(cls))}):')
        source = ''.join(inspect.getsource(c) for c in cls.__mro__[-2::-1])  # base classes first
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', source, re.M))
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            print(f'  --{f.name}={f.default!r}  ({expected(hints[f.name])})\n        {comments.get(f.name, "")}')
    sys.exit(0)
